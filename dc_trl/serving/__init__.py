"""A vLLM server: it is started, queried, given new weights, and refused if it does not fit.

What samples imports it, and the command that starts one; it knows no trainer.
"""
