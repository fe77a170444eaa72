"""Checks before the first step, so that no run trains nothing or fails in the middle of its work.

The trainers import it, and `dc-trl train` before it starts a server; `grading.checked_reward` checks what rewards
return.
"""
