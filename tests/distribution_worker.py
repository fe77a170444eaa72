"""Runs in one process or in several, which compute the same: `-m tests.distribution_worker FOLDER NAME …`.

Completions follow from the prompt, so that a global batch is the same however it is divided. Everything else is real:
accelerate's processes and sharding, TRL's loop, the optimizer, the replica. The main process writes what the runs
logged into `logs.json`.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import LoraConfig

from dc_trl import DCGRPOTrainer

from .helpers import (
    Rollouts,
    at_server,
    draw_completion,
    make_experts,
    make_model,
    make_prompts,
    make_trainer,
)
from .stub_server import stub_server


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
        seeds = (f"{call} {prompt} {number % GROUP if training else 0}" for number, prompt in enumerate(prompt_ids))
        completions, logprobs = zip(*(draw_completion(random.Random(seed), 7) for seed in seeds), strict=True)
        spoil, part = self.spoiled
        first = self.accelerator.process_index * len(completions)
        for number in range(GLOBAL)[part] if training else ():
            if first <= number < first + len(completions):
                spoil(completions[number - first])
        return list(completions), list(logprobs)


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
MINI_BATCHES = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "learning_rate": 0.0, "num_iterations": 2}
OF_AN_ADAPTER = {"peft_config": LoraConfig(r=4, init_lora_weights=False)}
AT_THE_LAG = {
    "constraint_target": "lag",
    "constraint_form": "log_ratio",
    "lambda_init": 0.1,
    "weight_sync_steps": 3,
    "learning_rate": 1e-2,
}
# Fields of each run, and what is done to which completions.
RUNS: dict[str, tuple[dict, tuple]] = {
    "steps": ({}, ()),
    "accumulated": (
        {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "max_steps": 4, "rollout_correction": "icepop"},
        (),
    ),
    "mini-batches": (MINI_BATCHES | {"max_steps": 5, "scale_rewards": "none", "batch_reduction": "token"}, ()),
    "a rank without a token": ({"mask_truncated_completions": True}, (truncate, LAST)),
    "a rank without a group": ({"drop_zero_std_groups": True}, (make_alike, LAST)),
    "experts": ({}, ()),
    "through the deployed forward": ({"train_through_quantization": True}, ()),
    "the lag's part": (AT_THE_LAG, ()),
    "the lag of an adapter": (AT_THE_LAG | OF_AN_ADAPTER, ()),
    "the lag of an adapter at a server": (AT_THE_LAG | OF_AN_ADAPTER | at_server(None), ()),
    "streams": ({}, ()),
    "in bfloat16": ({"bf16": True, "max_steps": 1}, ()),
    "rollouts": ({"deployment_scheme": None}, ()),  # the one that DeepSpeed's ZeRO-3 can make
}


def train(folder: Path, name: str, url: str) -> dict:
    fields, spoiled = RUNS[name]
    if fields.get("use_vllm"):
        fields = fields | {"vllm_server_base_url": url}
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    fields = {
        "max_steps": 3,
        "lambda_lr": 0.5,
        "learning_rate": 1e-3,
        "num_generations": GROUP,
        "per_device_train_batch_size": GLOBAL // processes,
        "per_device_eval_batch_size": 4 // processes,
        "num_generations_eval": 1,
        "deployment_scheme": "fp8",
    } | fields
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        fields |= {"use_cpu": False, "ddp_backend": "gloo"}  # as it runs without a GPU
    kind: type[DCGRPOTrainer] = DCGRPOTrainer if name == "rollouts" else Known
    model = make_experts(64) if name == "experts" else make_model(64)
    if name == "experts":
        model.config.router_aux_loss_coef = 0.0  # a loss of each process by itself
    # Two processes fill the last batch of five prompts up with the first ones in TRL's order, and count these again.
    again = torch.randperm(5, generator=torch.Generator().manual_seed(42))[:3].tolist()
    prompts = make_prompts(5).select([*range(5), *(again if processes == 1 else [])])
    problems = make_prompts()
    if name == "streams":  # which TRL shuffles otherwise
        again = list(make_prompts(5).to_iterable_dataset().shuffle(seed=42))[:3]
        rows = Dataset.from_list([*make_prompts(5), *(again if processes == 1 else [])])
        problems, prompts = problems.to_iterable_dataset(), rows.to_iterable_dataset()
    fields |= {"train_dataset": problems, "eval_dataset": prompts}
    rollouts = Rollouts() if name == "rollouts" else None
    trainer = make_trainer(folder / name, model, reward, kind, rollout_func=rollouts, **fields)
    if spoiled:
        trainer.spoiled = spoiled
    dtypes, compare = [], trainer.parts[0].compare
    trainer.parts[0].compare = lambda batch, logps: (dtypes.append(str(logps.dtype)), compare(batch, logps))
    trainer.train()
    logs = {
        "dtypes": dtypes,
        "kind": trainer.accelerator.distributed_type.value,
        "lambda": gather_object([trainer.lagrange_multiplier.value]),
        "rows": [row for row in trainer.state.log_history if "loss" in row],
    }
    if name != "rollouts":
        # After a forward pass alone, FSDP2 keeps some weights gathered, rounded to what it computes in.
        logs["evaluation"] = trainer.evaluate()
        trainer.save_deployment(folder / name / "deployment")
        trainer.save_model(str(folder / name / "model"))
    return logs


# Runs that the replica samples for: a whole one, and one that goes on from its checkpoint; saved as one, or in shards.
SAMPLED = {
    "whole": None,
    "resumed": "whole/checkpoint-2",
    "in shards": None,
    "resumed from shards": "in shards/checkpoint-2",
}


def sample(folder: Path, name: str) -> dict:
    fields = {"deployment_scheme": "fp8", "max_steps": 4, "save_steps": 2, "lambda_lr": 5.0}
    fields |= AT_THE_LAG  # saved between two synchronizations
    fields |= {"per_device_train_batch_size": GLOBAL // int(os.environ["WORLD_SIZE"])}
    trainer = make_trainer(folder / name, make_model(64), **fields)
    plugin = trainer.accelerator.state.fsdp_plugin  # which all runs of a process have in common
    plugin.state_dict_config = plugin.optim_state_dict_config = None
    plugin.set_state_dict_type("SHARDED_STATE_DICT" if name.endswith("shards") else "FULL_STATE_DICT")
    trainer.train(resume_from_checkpoint=str(folder / SAMPLED[name]) if SAMPLED[name] else None)
    names = ("step", "loss", "grad_norm", "discrepancy/mean", "discrepancy/lag_mean", "lagrangian/lambda")
    rows = [{name: row[name] for name in names} for row in trainer.state.log_history if "loss" in row]
    return {"kind": trainer.accelerator.distributed_type.value, "rows": rows}


def main() -> None:
    folder, *names = sys.argv[1:]
    Path(folder).mkdir(exist_ok=True)
    with stub_server() as server:  # the main process's gets weights; none is asked for completions
        logs = {
            name: sample(Path(folder), name) if name in SAMPLED else train(Path(folder), name, server.url)
            for name in names
        }
    if int(os.environ.get("RANK", "0")) == 0:
        Path(folder, "logs.json").write_text(json.dumps(logs))
    time.sleep(1)  # see scripts/train.py: gloo's thread lets go of the last gather
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
