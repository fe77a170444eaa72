"""Figures, and the self-contained page of a run."""

from .run_report import write_report


__all__ = ["write_report"]
