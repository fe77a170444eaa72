"""The policy in its deployment scheme: its tensors, their number formats and the checkpoint that is served.

What samples, deploys or compares a policy imports it; it knows no server and no trainer.
"""
