"""A task without a constant answer that SmolLM2-135M learns in 40 steps: the next number of an arithmetic sequence.

    python scripts/study/sequences.py --model runs/real_model --output_dir runs/sequences

writes `problems.jsonl`, and in `model/` the model without its chat template: it continues plain text. With
`--dithered`, a second one is in `dithered/`, in float32, with each weight moved at random by up to one step of
bfloat16's grid, on which those of `model/` lie.
"""

import json
import random
import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dc_trl.settings.command_line import OptionParser


KINDS = {"upward": 1, "downward": -1}


def sequence_problems(size: int, seed: int) -> list[dict[str, str]]:
    """Make different problems: a `prompt` with four numbers below 100, the fifth as the `answer`, and its `kind`."""
    rng = random.Random(seed)
    problems: dict[str, dict[str, str]] = {}
    while len(problems) < size:
        step, low, kind = rng.randint(1, 9), rng.randint(1, 95), rng.choice(list(KINDS))
        numbers = [low + step * place for place in range(5)][:: KINDS[kind]]
        if max(numbers) < 100:
            prompt = ", ".join(map(str, numbers[:-1])) + ","
            problems[prompt] = {"prompt": prompt, "answer": str(numbers[-1]), "kind": kind}
    return list(problems.values())


def continues_the_sequence(
    completions: list[str],
    answer: list[str],
    kind: list[str],
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: object,
) -> list[float]:
    """Return 1 where a completion begins with the answer, and else 0; in training, log the mean of each kind."""
    firsts = [re.match(r"\s*(\d+)", text) for text in completions]
    rewards = [float(first is not None and first[1] == gold) for first, gold in zip(firsts, answer, strict=True)]
    if log_metric is not None:
        for name in dict.fromkeys(kind):
            of_kind = [reward for reward, each in zip(rewards, kind, strict=True) if each == name]
            log_metric(f"accuracy/{name}", statistics.fmean(of_kind))
    return rewards


@torch.no_grad()
def dithered(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Move each weight of a model by a relative 2⁻⁸ at most, at random, and return the model."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.mul_(1 + (torch.rand(parameter.shape, generator=generator) * 2 - 1) * 2**-8)
    return model


if __name__ == "__main__":
    parser = OptionParser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="directory of SmolLM2-135M-Instruct")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--size", type=int, default=1100, help="number of problems (default: 1100)")
    parser.add_argument("--dithered", action="store_true", help="write the second model too")
    args = parser.parse_args()
    shutil.copytree(args.model, args.output_dir / "model")
    (args.output_dir / "model" / "chat_template.jinja").unlink()
    if args.dithered:
        folder = args.output_dir / "dithered"
        dithered(AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)).save_pretrained(folder)
        AutoTokenizer.from_pretrained(args.output_dir / "model").save_pretrained(folder)
    rows = sequence_problems(args.size, seed=0)
    (args.output_dir / "problems.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
