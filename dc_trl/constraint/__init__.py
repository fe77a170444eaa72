"""`Constraint`: sampled tokens in, advantages and metrics out, without TRL and vLLM.

Whatever samples, trains or measures may import it.
"""
