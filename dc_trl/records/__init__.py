"""The records that runs and evaluations leave, read without TRL, and their statistics."""
