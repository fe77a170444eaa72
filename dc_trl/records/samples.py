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
    """Completions of the generation batch in use at an optimizer step; `log` counts the logs of the run."""

    log: int
    step: int
    samples: list[Sample]


class _Kept(NamedTuple):
    """The content of the file."""

    moments: list[Moment]


def choose_samples(prompts: Sequence[Any], completions: Sequence[Any], rewards: Sequence[float]) -> list[Sample]:
    """Return the first completion of a batch, and those with the highest and the lowest reward.

    Of several with the same reward it takes the first that is not chosen yet. A completion is returned only once.

    Args:
        prompts, completions: texts, or lists of messages.
        rewards: one for each completion, NaN where there is none.
    """
    chosen = {0: "first"} if len(rewards) else {}
    rated = [i for i, reward in enumerate(rewards) if not math.isnan(reward)]
    for which, sign in (("best", 1), ("worst", -1)):
        if rated:
            most = max(sign * rewards[i] for i in rated)
            those = [i for i in rated if sign * rewards[i] == most]
            index = next((i for i in those if i not in chosen), those[0])
            chosen[index] = f"{chosen[index]}, {which}" if index in chosen else which
    samples = []
    for i, which in chosen.items():
        prompt, completion = (shortened(readable(texts[i])) for texts in (prompts, completions))
        samples.append(Sample(which, prompt, completion, None if math.isnan(rewards[i]) else float(rewards[i])))
    return samples


def readable(text: Any) -> str:
    """Return a prompt or a completion as text: messages as their roles and contents, images as a word."""
    if isinstance(text, str):
        return text
    if not isinstance(text, list):
        return json.dumps(text, ensure_ascii=False, default=str)
    lines = []
    for message in text:
        parts = message.get("content") or ""
        if not isinstance(parts, str):
            parts = "".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in parts)
        calls = [
            json.dumps(call.get("function", call), ensure_ascii=False) for call in message.get("tool_calls") or ()
        ]
        lines.append(f"{message.get('role', 'message')}: " + "\n".join(filter(None, [parts, *calls])))
    return "\n".join(lines)


def shortened(text: str, longest: int = LONGEST) -> str:
    """Return the text, without its middle where it is longer than so many characters."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"


class SampleRecord:
    """Keeps completions of at most `MOST_MOMENTS` moments, spread over a run of unknown length.

    At first it keeps each moment. When there are too many, it drops every second one, and from then on keeps only
    every second one, and so on. It always keeps the latest moment.

    Args:
        folder: output directory of the run.
        step: that the run starts from. Moments of later steps, from an earlier start, are dropped.
    """

    def __init__(self, folder: Path, step: int = 0):
        self._path = folder / SAMPLES_FILE
        self._moments = [moment for moment in read_samples(folder) if moment.step <= step] if step > 0 else []
        # The distance between kept logs; in a resumed run the second row shows it.
        self._stride = max(1, self._moments[1].log) if len(self._moments) > 2 else 1

    def add(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the completions of a step into the file."""
        last = self._moments[-1] if self._moments else None
        if last is not None and last.log % self._stride:
            self._moments.pop()
        latest = Moment(0 if last is None else last.log + 1, step, list(samples))
        self._moments.append(latest)
        while len(self._moments) > MOST_MOMENTS:
            self._stride *= 2
            self._moments = [moment for moment in self._moments if moment.log % self._stride == 0 or moment is latest]
        write_result(_Kept(self._moments), self._path, indent=1)


def read_samples(folder: Path) -> list[Moment]:
    """Read the moments that a run has kept, in the order of their steps; [] where it has kept none.

    Raises:
        ValueError: the file holds something else; the message names it.
    """
    path = folder / SAMPLES_FILE
    return read_result(_Kept, path, "completions of a run").moments if path.is_file() else []


def three_moments(moments: Sequence[Moment]) -> list[Moment]:
    """Return the first moment, the one nearest to the middle of the steps, and the last."""
    if not moments:
        return []
    first, last = moments[0], moments[-1]
    middle = min(moments, key=lambda moment: abs(2 * moment.step - first.step - last.step))
    return [moment for moment in moments if moment in (first, middle, last)]
