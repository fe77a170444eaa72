"""Callbacks: they log a run, decay its learning rate, watch for a collapse, ask benchmarks, write the summary."""
