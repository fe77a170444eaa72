"""From what a user writes to a trainer that runs."""
