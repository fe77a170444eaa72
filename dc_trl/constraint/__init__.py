"""What is constrained: the discrepancy, its multiplier, advantages.

Pure functions of tensors and numbers; no TRL, no vLLM.
"""
