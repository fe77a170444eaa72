"""Checkpoints from which a run resumes, and the signals that stop it."""
