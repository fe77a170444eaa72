"""Checkpoints that a run can go on from, and the signals that stop it."""
