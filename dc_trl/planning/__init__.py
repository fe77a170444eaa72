"""What a run will need and where its time will go, from a model's configuration alone: no weights, no engine."""
