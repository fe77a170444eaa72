"""Whether a machine can do what dc_trl needs: one small training in each scheme, and a block for an issue.

The command imports it; it loads torch only in the processes that it starts, since it has to speak without.
"""
