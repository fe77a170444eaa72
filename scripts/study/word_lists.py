"""The first task of SmolLM2-135M-Instruct, which has a trap: name the first or the last word of a list.

    python scripts/study/word_lists.py --output_dir runs/word_lists

writes problems.jsonl, and prints the trap of this task: what a policy earns on the held-out problems of each seed that
always names the first word. `names_the_word` is the reward of `real_model/base.yaml`.
"""

import json
import random
import re
from pathlib import Path

from datasets import Dataset

from dc_trl.settings.command_line import OptionParser


NOUNS = (
    "river stone apple cloud bread chair house tree moon star horse table paper glass water fire road bridge garden "
    "window door key book lamp clock phone shirt shoe hat coat ring coin ship train plane bus car bike boat lake sea "
    "hill field forest flower grass leaf root seed fruit lemon grape peach melon onion carrot rice corn bean soup "
    "salt sugar honey milk butter cheese egg meat fish bird cat dog cow sheep goat pig duck lion tiger bear wolf fox "
    "deer mouse snake frog bee ant spider king queen knight castle tower wall roof floor bed sofa desk pen ink brush "
    "paint music song drum flute bell ball game card doll kite rope box bag cup plate fork spoon knife"
)
WORDS = NOUNS.split()
QUESTION = "What is the {which} word of this list? "


def word_list_problems(size: int, seed: int) -> list[dict[str, str]]:
    """Make different problems, each a `prompt` about four words and the `answer`, one of them."""
    rng = random.Random(seed)
    problems: dict[str, str] = {}
    while len(problems) < size:
        words, which = rng.sample(WORDS, 4), rng.choice(["first", "last"])
        problems[QUESTION.format(which=which) + ", ".join(words)] = words[0 if which == "first" else -1]
    return [{"prompt": prompt, "answer": answer} for prompt, answer in problems.items()]


def names_the_word(
    prompts: list[list[dict[str, str]]], completions: list[list[dict[str, str]]], answer: list[str], **kwargs: object
) -> list[float]:
    """Return 1 where a completion names the answer and no other word of the list, 0.2 where others, else 0."""
    return [
        _reward(prompt[-1]["content"], turns[-1]["content"], gold)
        for prompt, turns, gold in zip(prompts, completions, answer, strict=True)
    ]


def _reward(prompt: str, completion: str, gold: str) -> float:
    words = set(prompt.split("? ")[1].split(", "))
    named = words & set(re.findall(r"\w+", completion.lower()))
    return 1.0 if named == {gold} else 0.2 if named else 0.0


def trap(rows: list[dict[str, str]], held_out: int, seed: int) -> float:
    """Return the mean reward of always naming the first word, on the problems that a run of a seed holds out."""
    problems = Dataset.from_list(rows).train_test_split(test_size=held_out, seed=seed)["test"]
    firsts = [prompt.split("? ")[1].split(",")[0] for prompt in problems["prompt"]]
    rewards = map(_reward, problems["prompt"], firsts, problems["answer"])
    return sum(rewards) / held_out


if __name__ == "__main__":
    parser = OptionParser(__doc__)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--size", type=int, default=1024, help="number of problems (default: 1024)")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    rows = word_list_problems(args.size, seed=0)
    (args.output_dir / "problems.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for seed in range(1, 6):
        print(f"seed {seed}: always naming the first word earns {trap(rows, 128, seed):.4f}")
