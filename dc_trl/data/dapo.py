"""DAPO-Math-17K, the training problems."""

import re
from dataclasses import replace

from datasets import Dataset

from ..grading import GRADING_COLUMNS, gold_answer
from .prompts import nested, text_of_prompt
from .sources import MathProblem, Row, Source, field_of, to_dataset


# What the Hub's rows put around a problem. It asks for another form of answer than our prompts do.
_TEMPLATE = re.compile(
    r"Solve the following math problem step by step\. The last line of your response should be of the form "
    r"Answer: \$Answer \(without quotes\) where \$Answer is the answer to the problem\.\s+"
    r'(?P<problem>.*?)\s+Remember to put your answer on its own line after "Answer:"\.?\s*',
    re.DOTALL,
)


def remove_template(prompt: str) -> str:
    """Return the problem without the instructions that the Hub's rows put before and after it."""
    match = _TEMPLATE.fullmatch(prompt)
    return match["problem"] if match else prompt


def _dapo(row: Row) -> MathProblem:
    return MathProblem(
        problem=remove_template(text_of_prompt(field_of(row, "prompt", "problem"))),
        # A row without a gold answer is for cleaning to leave out, and to count.
        answer=gold_answer((row.get("reward_model") or row).get("ground_truth", row.get("answer"))) or "",
    )


# The revision was read in several public repositories that pin it; it was not checked on the Hub itself.
DAPO = Source("BytedTsinghua-SIA/DAPO-Math-17k", None, "train", "65877096c24ffa7abc4e4fa5edb95cf3413a5674", _dapo)


def load_dapo(file: str | None = None, prompt_column: str | None = None, answer_column: str | None = None) -> Dataset:
    """Load DAPO-Math-17K with the columns of `dc_trl.data.sources.FEATURES`, uncleaned, in its own order.

    The Hub's file holds each row about 100 times: of equal rows one is taken.

    Args:
        file: local JSON, JSONL, Parquet or CSV file in place of the Hub.
        prompt_column: text or chat messages, where the rows are not DAPO's. Those of `GRADING_COLUMNS` are read too. A
            dot reads nested fields. `prompt` if only the other column is given.
        answer_column: number, or text with the gold answer, of which only what follows `####` counts. `answer` if only
            the other column is given.

    Raises:
        ValueError: the file cannot be loaded, or a field is missing.
    """

    def of_columns(row: Row) -> MathProblem:
        return MathProblem(
            problem=remove_template(text_of_prompt(nested(row, prompt_column or "prompt", "prompt_column"))),
            answer=gold_answer(nested(row, answer_column or "answer", "answer_column")) or "",
            **{column: row[column] for column in GRADING_COLUMNS if row.get(column) is not None},
        )

    source = replace(DAPO, convert=of_columns) if prompt_column or answer_column else DAPO
    return to_dataset("dapo", dict.fromkeys(source.problems(file)))
