"""The bases of `DCGRPOTrainer`: each file adds one feature to TRL's trainer and knows only those below it."""
