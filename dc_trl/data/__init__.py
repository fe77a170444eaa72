"""Prompts and gold answers: loading, cleaning, and the built-in arithmetic.

Commands and evaluations import it; it knows no model.
"""
