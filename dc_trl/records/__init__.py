"""The records that runs and evaluations leave: read without TRL, with their statistics, tables, figures and page.

Whatever writes or reads a run may import it.
"""
