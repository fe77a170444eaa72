"""Evaluation of a policy on benchmarks as it is deployed: avg@k, pass@k and maj@k.

The commands import it; it asks engines of its own, and needs no trainer.
"""

from .benchmarking import RESULTS_FILE, Benchmark, evaluate, tokenize_prompts


__all__ = ["RESULTS_FILE", "Benchmark", "evaluate", "tokenize_prompts"]
