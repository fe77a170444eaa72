"""The constraint: the discrepancy, its multiplier and the advantages.

These are pure functions of tensors and numbers, without TRL and vLLM.
"""
