"""Whether a machine can do what dc_trl needs: a few small checks in minutes, and a block to paste into an issue."""
