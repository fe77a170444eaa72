"""What samples: the in-process replica and the vLLM engines, with what they sample kept in TRL's buffer."""
