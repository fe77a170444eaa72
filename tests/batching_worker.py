"""Length-aware batches and TRL's own in two processes: `-m tests.batching_worker FOLDER`.

The main process writes the gradients' differences and the tokens that each process read to `found.json`.
"""

import json
import sys
import time
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import gather_object

from dc_trl import DCGRPOTrainer

from .helpers import TINY_MODEL, Rollouts, distinct_characters, logged
from .test_batching_trainer import KINDS, Spread, gaps, half_and_half, tokens, train
from .test_trainer import empty_completions


def only_there(call, completions, logprobs):
    """Empty completions in the second process: it alone has a tool mask."""
    if PartialState().process_index == 1:
        empty_completions(call, completions, logprobs)


def equal_there(completions, **columns):
    """All groups of the second process are dropped, so that its micro-batches are masked whole."""
    rewards = distinct_characters(completions, **columns)
    return [1.0] * len(rewards) if PartialState().process_index == 1 else rewards


CASES = {
    "across passes": {"steps_per_generation": 6, "num_iterations": 2, "max_steps": 5},
    "dapo": {"loss_type": "dapo"},
    "bnpo": {"loss_type": "bnpo"},
}
# Of which TRL's trainer knows nothing: against the same trainer without length-aware batches.
OURS = {
    "empty completions": {"steps_per_generation": 8},
    "constraint": {"constraint": "lagrangian", "steps_per_generation": 8},
    "dropped groups": {"reward": half_and_half, "drop_zero_std_groups": True, "steps_per_generation": 8},
    "dropped there": {
        "reward": equal_there,
        "model": str(TINY_MODEL),  # the reference is loaded
        "drop_zero_std_groups": True,
        "beta": 0.1,
        "gradient_accumulation_steps": 1,
        "num_iterations": 2,
        "steps_per_generation": 1,
        "learning_rate": 1e-2,
        "max_steps": 3,
    },
}
# Means over the tokens of all processes, which TRL logs.
MEANS = ("entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")


def main() -> None:
    folder = Path(sys.argv[1])
    found = {}
    for name, options in (CASES | OURS).items():
        options = {"max_steps": 2} | options
        runs = []
        for kind, length_aware in zip((DCGRPOTrainer,) * 2 if name in OURS else KINDS, (True, False), strict=True):
            rollouts = Rollouts(30, edit=only_there) if name == "empty completions" else Spread()
            runs.append(train(kind, folder, rollouts, length_aware_batches=length_aware, **options))
        found[name] = {
            "gaps": gaps(*runs),
            "means": [{mean: logged(run.trainer, mean) for mean in MEANS} for run in runs],
            "tokens": [gather_object([tokens(run)]) for run in runs],
            "forwards": gather_object([len(runs[0].widths)]),
            "kind": str(runs[0].trainer.accelerator.distributed_type),
        }
    if PartialState().is_main_process:
        (folder / "found.json").write_text(json.dumps(found))
    time.sleep(1)  # see scripts/train.py: gloo's thread lets go of the last gather
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
