"""Evaluation of a policy on benchmarks as it is deployed: avg@k, pass@k and maj@k."""

from .evaluate import RESULTS_FILE, Benchmark, evaluate, tokenize_prompts


__all__ = ["RESULTS_FILE", "Benchmark", "evaluate", "tokenize_prompts"]
