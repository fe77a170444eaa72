"""What a run will hold on its devices, and what fits them, from a model's configuration: no weights, no engine."""
