"""The engine that samples and which weights it holds: the in-process replica, and vLLM.

Trainers, parts, evaluations and calibrations import it.
"""
