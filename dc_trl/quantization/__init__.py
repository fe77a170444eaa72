"""The policy in its deployment scheme: its tensors, their number formats, the checkpoint that is served."""
