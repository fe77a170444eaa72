"""The constraint: the discrepancy, its multiplier and the advantages, as functions without TRL and vLLM."""
