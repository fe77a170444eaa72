"""Ablations: a sweep over fields of the configuration and seeds is planned, run job by job, and collected."""
