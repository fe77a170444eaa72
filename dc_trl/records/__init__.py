"""What runs and evaluations leave to be read again, and the statistics of it; no TRL."""
