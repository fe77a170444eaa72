"""A vLLM server: it is started, queried, given new weights, and refused if it does not fit."""
