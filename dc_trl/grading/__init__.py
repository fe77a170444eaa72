r"""Whether a boxed answer equals a gold answer, decided safely. What counts as correct: docs/rewards.md.

`text` (LaTeX to plain spelling) → `literals` (numbers, units) → `expressions` (math-verify) → `answers` (verdicts) →
`pool` (workers with limits). `rewards` are the shipped reward functions, `checked_reward` calls those of a user.
"""

from .answers import GRADING_COLUMNS, Gold, Verdict, grade, is_gradable
from .pool import Grader
from .text import extract_answer, gold_answer


__all__ = ["GRADING_COLUMNS", "Gold", "Grader", "Verdict", "extract_answer", "gold_answer", "grade", "is_gradable"]
