"""A second task for SmolLM2-135M, to confirm on: small sums and differences, after three that are solved.

    python scripts/study/sums.py --output_dir runs/sequences

writes `sums.jsonl` beside the problems and models of `sequences.py`, whose reward it shares. SmolLM2-135M begins at
0.26 sampled and 0.29 greedy. Two trial runs in step in BF16: at 2e-5 (seed 99) it had 0.38 and 0.43 after 40 steps,
and had learned both kinds; at 5e-5 (seed 98) it had 0.10 and 0.11 after 20.
"""

import json
import random
from pathlib import Path

from dc_trl.settings.command_line import OptionParser


KINDS = ("sum", "difference")
_SOLVED = 3  # before the one that is asked
_LARGEST = 20  # number that is added or found


def sum_problems(size: int, seed: int) -> list[dict[str, str]]:
    """Make different problems: a `prompt` of four lines, the `answer` of the last one, and its `kind`."""
    rng = random.Random(seed)
    problems: dict[str, dict[str, str]] = {}
    while len(problems) < size:
        kinds = [rng.choice(KINDS) for _ in range(_SOLVED + 1)]
        lines = [_line(rng.randint(1, _LARGEST), rng.randint(1, _LARGEST), kind) for kind in kinds]
        prompt, answer = "\n".join(lines).rsplit(" ", 1)
        problems[prompt] = {"prompt": prompt, "answer": answer, "kind": kinds[-1]}
    return list(problems.values())


def _line(first: int, second: int, kind: str) -> str:
    both = first + second
    return f"{first} + {second} = {both}" if kind == "sum" else f"{both} - {second} = {first}"


if __name__ == "__main__":
    parser = OptionParser(__doc__)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--size", type=int, default=1100, help="number of problems (default: 1100)")
    args = parser.parse_args()
    rows = sum_problems(args.size, seed=0)
    (args.output_dir / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
