"""Prompts and gold answers."""
