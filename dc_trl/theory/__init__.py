"""What each of the three penalties makes of a policy, in closed form (arXiv 2606.08779, Appendix B)."""

from .policies import budgeted_policy, optimal_policy, squared_discrepancy


__all__ = ["budgeted_policy", "optimal_policy", "squared_discrepancy"]
