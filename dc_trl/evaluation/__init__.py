"""How good a policy is: avg@k, pass@k and maj@k of benchmarks, in the formats that it may be served in."""

from .evaluate import RESULTS_FILE, Benchmark, EvaluationSettings, evaluate, tokenize_prompts


__all__ = ["RESULTS_FILE", "Benchmark", "EvaluationSettings", "evaluate", "tokenize_prompts"]
