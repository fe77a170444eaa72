r"""Whether a boxed answer equals a gold answer, decided safely. What counts as correct: docs/grading.md.

`text` (plain spelling) → `literals` (numbers and units) → `expressions` (math-verify) → `answers` (the verdict)
→ `pool` (worker processes with limits).
"""

from .answers import GRADING_COLUMNS, Gold, Verdict, grade, is_gradable
from .pool import Grader
from .text import extract_answer, gold_answer


__all__ = ["GRADING_COLUMNS", "Gold", "Grader", "Verdict", "extract_answer", "gold_answer", "grade", "is_gradable"]
