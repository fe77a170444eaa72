"""Runs whose completions are known, in one process or in several: `-m tests.distribution_worker FOLDER NAME …`.

Completions follow from the prompt, so that a global batch is the same however it is divided. Everything else is real:
accelerate's processes and sharding, TRL's loop, the optimizer, the replica. The main process writes `NAME.json` with
what each run logged.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import torch
from accelerate.utils import gather_object

from dc_trl import DCGRPOTrainer

from .helpers import Rollouts, make_config, make_experts, make_model, make_prompts, make_tokenizer


ALIKE = 97  # first token of completions with one reward
GROUP = 4  # completions of a prompt
GLOBAL = 8  # completions of a micro-batch, of all processes


class Known(DCGRPOTrainer):
    """Samples nothing: the completions and their log-probabilities follow from prompt, place in the group and call."""

    spoiled: tuple = (None, slice(0))  # what is done to which completions of a global batch
    calls = 0

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        training = self.model.training
        call = self.calls if training else -1
        self.calls += training
        completions, logprobs = [], []
        for number, prompt in enumerate(prompt_ids):
            rng = random.Random(f"{call} {prompt} {number % GROUP if training else 0}")
            length = rng.randint(1, 7)
            completions.append([rng.randrange(10, 200) for _ in range(length)] + [1])
            logprobs.append([-rng.uniform(0.01, 6.0) for _ in range(length + 1)])
        spoil, part = self.spoiled
        first = self.accelerator.process_index * len(completions)
        for number in range(GLOBAL)[part] if training else ():
            if first <= number < first + len(completions):
                spoil(completions[number - first])
        return completions, logprobs


def truncate(ids):
    """Cuts a completion off: its last token ends nothing."""
    ids[-1] = 20


def make_alike(ids):
    """Has a completion earn what the others of its group earn."""
    ids[0] = ALIKE


def reward(completions, completion_ids, **kwargs):
    return [
        0.5 if ids[0] == ALIKE else len(set(text)) / 10 for ids, text in zip(completion_ids, completions, strict=True)
    ]


FIRST, LAST = slice(0, GROUP), slice(-GROUP, None)  # groups of a global batch, which two processes have one each
TWO_SIDED = {"constraint": "static", "lambda_init": 0.5, "deployment_scheme": "int4"}
BALANCE = {"constraint": "balance", "constraint_form": "log_ratio", "mask_truncated_completions": True}
MINI_BATCHES = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "learning_rate": 0.0, "num_iterations": 2}
# Fields of each run, and what is done to which completions.
RUNS: dict[str, tuple[dict, tuple]] = {
    "steps": ({}, ()),
    "accumulated": ({"gradient_accumulation_steps": 2, "steps_per_generation": 2, "max_steps": 4}, ()),
    "mini-batches": (MINI_BATCHES | {"advantage_estimator": "rloo", "batch_reduction": "token"}, ()),
    "a rank without a token": ({"mask_truncated_completions": True}, (truncate, LAST)),
    "a rank without a group": ({"drop_zero_std_groups": True}, (make_alike, LAST)),
    "two-sided KL": (TWO_SIDED | {"constraint_form": "two_sided_kl"}, ()),
    "two-sided L1": (TWO_SIDED | {"constraint_form": "two_sided_l1"}, ()),
    "balance": (BALANCE, ()),
    "balance of the first group": (BALANCE | {"max_steps": 1}, (truncate, LAST)),
    "balance of the last group": (BALANCE | {"max_steps": 1}, (truncate, FIRST)),
    "experts": ({}, ()),
    "through the deployed forward": ({"train_through_quantization": True}, ()),
    "rollouts": ({"deployment_scheme": None, "ddp_backend": "gloo"}, ()),  # the one that DeepSpeed's ZeRO-3 can make
}


def train(folder: Path, name: str) -> dict:
    fields, spoiled = RUNS[name]
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    options = {
        "max_steps": 3,
        "lambda_lr": 0.5,
        "learning_rate": 1e-3,
        "num_generations": GROUP,
        "per_device_train_batch_size": GLOBAL // processes,
        "per_device_eval_batch_size": 4 // processes,
        "num_generations_eval": 1,
        "deployment_scheme": "fp8",
        "use_cpu": os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true",  # without a GPU it wants ddp_backend
    }
    model = make_experts(64) if name == "experts" else make_model(64)
    if name == "experts":
        model.config.router_aux_loss_coef = 0.0  # a loss of each process by itself
    trainer = (DCGRPOTrainer if name == "rollouts" else Known)(
        model,
        reward,
        make_config(folder / name, **options | fields),
        train_dataset=make_prompts(),
        eval_dataset=make_prompts(5),  # which no number of processes divides
        processing_class=make_tokenizer(),
        rollout_func=Rollouts() if name == "rollouts" else None,
    )
    if spoiled:
        trainer.spoiled = spoiled
    trainer.train()
    logs = {
        "kind": trainer.accelerator.distributed_type.value,
        "lambda": gather_object([trainer.lagrange_multiplier.value]),
        "rows": [row for row in trainer.state.log_history if "loss" in row],
    }
    if name in ("steps", "experts"):
        logs["evaluation"] = trainer.evaluate()
        trainer.save_model(str(folder / name / "model"))
        trainer.save_deployment(folder / name / "deployment")
    return logs


def main() -> None:
    folder, *names = sys.argv[1:]
    logs = {}
    for name in names:
        logs[name] = train(Path(folder), name)
    if int(os.environ.get("RANK", "0")) == 0:
        Path(folder, "logs.json").write_text(json.dumps(logs))
    time.sleep(1)  # see scripts/train.py: gloo's thread lets go of the last gather
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
