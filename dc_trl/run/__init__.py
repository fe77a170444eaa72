"""The life of a run: lock, checkpoints, history, progress, export, push, and the signals that end it.

The trainers and what is above them import it.
"""
