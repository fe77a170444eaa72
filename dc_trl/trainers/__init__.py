"""What `DCGRPOTrainer` stands on: each file adds one thing to TRL's trainer, and knows only those below it."""
