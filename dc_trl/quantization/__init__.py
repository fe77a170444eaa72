"""The policy in its deployment scheme: its tensors, their number formats and the checkpoint that is served."""
