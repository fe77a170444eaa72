"""A run on the Hub: what is pushed, and the card that describes it."""
