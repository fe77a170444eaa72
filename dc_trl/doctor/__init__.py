"""Whether a machine can do what dc_trl needs: one small training in each scheme, and a block for an issue."""
