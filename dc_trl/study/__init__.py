"""A study: sweeps over many cells with seeds, raw lines of every run, and comparisons that were named beforehand."""
