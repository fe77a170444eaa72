"""Checks before the first step, so that no run trains nothing or fails in the middle of its work.

The trainers' constructors make these checks, and `dc-trl train` makes them before it starts a server, so that Python
and the command refuse with the same messages. Checks that need only arguments come first (`start`, `rows`), then those
that need the loaded policy (`policy`, `fit`). `settings.reward_functions` checks the results of reward functions.
"""
