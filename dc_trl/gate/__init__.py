"""What is looked at before the first step, so that no run trains nothing, or ends in the middle of what it began.

The trainers' constructors ask these questions, and `dc-trl train` asks the same ones before it starts a server, so
that Python and the command refuse in the same words. What needs only arguments comes first (`start`, `rows`), then
what needs the loaded policy (`policy`, `fit`). What reward functions return is checked in `settings.reward_functions`.
"""
