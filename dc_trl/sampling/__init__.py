"""Engines that sample, which are the in-process replica and vLLM, and their rollouts in TRL's buffer."""
