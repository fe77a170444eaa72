"""Figures and the run report: one self-contained page of one run, or of several laid over one another."""

from .run_report import write_report


__all__ = ["write_report"]
