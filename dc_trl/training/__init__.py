"""The steps from a user's configuration to a running trainer."""
