"""Completions that a run keeps for its readers: a few from some generation batches, shortened."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .results import read_result, write_result


SAMPLES_FILE = "completions.json"
MOST_MOMENTS = 9  # a run keeps completions of so many
LONGEST = 4000  # characters of a prompt or a completion; a longer one loses its middle


class Sample(NamedTuple):
    """A completion with its prompt; `which` says what it is in its batch: first, best, worst, or several of these.

    The reward is the weighted sum of all reward functions, None where no function gave one.
    """

    which: str
    prompt: str
    completion: str
    reward: float | None


class Moment(NamedTuple):
    """Completions of the generation batch in use at an optimizer step."""

    step: int
    samples: list[Sample]


class _Kept(NamedTuple):
    """The content of the file."""

    moments: list[Moment]


def choose_samples(prompts: Sequence[Any], completions: Sequence[Any], rewards: Sequence[float]) -> list[Sample]:
    """Return the first completion of a batch, and those with the highest and the lowest reward, each only once.

    Args:
        prompts, completions: texts, or lists of messages.
        rewards: one for each completion, NaN where there is none.
    """
    rated = [i for i, reward in enumerate(rewards) if not math.isnan(reward)]
    chosen: dict[int, list[str]] = {0: ["first"]} if len(rewards) else {}
    for which, choose in (("best", max), ("worst", min)):
        if rated:
            chosen.setdefault(choose(rated, key=lambda i: rewards[i]), []).append(which)
    samples = []
    for i, names in chosen.items():
        prompt, completion = (shortened(readable(texts[i])) for texts in (prompts, completions))
        samples.append(Sample(", ".join(names), prompt, completion, None if math.isnan(rewards[i]) else rewards[i]))
    return samples


def readable(text: Any) -> str:
    """Return a prompt or a completion as text: messages as their roles and contents, what is no text as JSON."""
    if not isinstance(text, list):
        return text if isinstance(text, str) else _json(text)
    lines = []
    for message in text:
        rest = {name: value for name, value in message.items() if name != "role"}
        only_text = list(rest) == ["content"] and isinstance(rest["content"], str)
        lines.append(f"{message.get('role', 'message')}: {rest['content'] if only_text else _json(rest)}")
    return "\n".join(lines)


def _json(value: Any) -> str:
    # An image is named by its type.
    return json.dumps(value, ensure_ascii=False, default=lambda item: f"({type(item).__name__})")


def shortened(text: str, longest: int = LONGEST) -> str:
    """Return the text, without its middle where it is longer than so many characters."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"


class SampleRecord:
    """Keeps completions of at most `MOST_MOMENTS` moments, spread over a run of unknown length.

    It always keeps the first moment and the latest. Of the others it drops those that are nearest to their neighbours.

    Args:
        folder: output directory of the run.
        step: that the run starts from. Moments of later steps, from an earlier start, are dropped.
    """

    def __init__(self, folder: Path, step: int = 0):
        self._path = folder / SAMPLES_FILE
        self._moments = [moment for moment in read_samples(folder) if moment.step <= step] if step > 0 else []

    def add(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the completions of a step into the file."""
        self._moments.append(Moment(step, list(samples)))
        while len(self._moments) > MOST_MOMENTS:
            steps = [moment.step for moment in self._moments]
            del self._moments[min(range(1, len(steps) - 1), key=lambda i: steps[i + 1] - steps[i - 1])]
        write_result(_Kept(self._moments), self._path, indent=1)


def read_samples(folder: Path) -> list[Moment]:
    """Read the moments that a run has kept, in the order of their steps; [] where it has kept none.

    Raises:
        ValueError: the file holds something else; the message names it.
    """
    path = folder / SAMPLES_FILE
    return read_result(_Kept, path, "completions of a run").moments if path.is_file() else []


def three_moments(moments: Sequence[Moment]) -> list[Moment]:
    """Return the first moment, the middle one, and the last."""
    last = len(moments) - 1
    return [moments[i] for i in sorted({0, last // 2, last})] if moments else []
