"""Training runs in a process of its own: `python -m tests.worker '{"output_dir": …, …}' …`, one after the other.

Options beside those of DCGRPOConfig: `kill_at` (the step after which the process kills itself, as a power cut would),
`kill_in_save` (the same, when the checkpoint of that step has its weights and no more), `server` (URL of a vLLM server
that has the tiny model in FP8; the folder that it gets weights in is written to `sync_folder.txt`), `colocate` (a
scheme for vLLM in this process), `benchmark` (so many problems of arithmetic, asked after the last step). The main
process writes `logs.json` into the output directory.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from dc_trl import DCGRPOTrainer, HistoryCallback
from dc_trl.callbacks.before_and_after import greedy_rewards
from dc_trl.sampling.vllm_backends import restore_cache_scales

from .gaps import PROMPTS, SampledBy
from .helpers import make_model, make_prompts, make_trainer, tiny_model


def scales_after_sleep(llm) -> list[list[list[float]]]:
    """The scales by which attention reads the KV cache, of each layer: as trained, after a sleep, restored.

    A sleep of level 2 keeps buffers, and leaves zeros of the rest; a CPU has none.
    """

    def scales(worker):
        layers = [layer for layer in worker.model_runner.model.modules() if hasattr(layer, "_k_scale")]
        return [[float(layer._q_scale), float(layer._k_scale), float(layer._v_scale)] for layer in layers]

    def sleep(worker):
        for name, weight in worker.model_runner.model.named_parameters():
            if ".attn." in name:
                weight.data.zero_()

    calls = (scales, sleep, scales, restore_cache_scales, scales)
    return [found for (found,) in map(llm.collective_rpc, calls) if found is not None]


class Kill(TrainerCallback):
    def __init__(self, step: int):
        self._step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


class KilledInSave(DCGRPOTrainer):
    kill_in_save: int | None = None

    def _save_optimizer_and_scheduler(self, output_dir):
        if self.state.global_step == self.kill_in_save:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_optimizer_and_scheduler(output_dir)


def train(options: dict[str, Any]) -> DCGRPOTrainer:
    kill_at, kill_in_save = options.pop("kill_at", None), options.pop("kill_in_save", None)
    benchmark = options.pop("benchmark", None)
    if benchmark is not None:
        options |= {"eval_steps": options["max_steps"]}
    server, colocate = options.pop("server", None), options.pop("colocate", None)
    if server is not None:
        options = {"deployment_scheme": "fp8"} | options | {"vllm_mode": "server", "vllm_server_base_url": server}
    if colocate is not None:
        options |= {"vllm_mode": "colocate", "vllm_max_model_length": 64, "deployment_scheme": colocate}
    options["use_vllm"] = bool(server or colocate)
    tiny = options["use_vllm"] or benchmark is not None
    model = tiny_model() if tiny else make_model(128)
    options["eval_dataset"] = None if benchmark is None else make_prompts(4)
    trainer = make_trainer(model=model, kind=KilledInSave, callbacks=[HistoryCallback()], **options)
    config = trainer.args
    trainer.kill_in_save = kill_in_save
    if colocate is not None:

        def complete():
            _, ids, logps, _ = trainer.vllm_generation.generate(PROMPTS, None, 1)
            return [{"ids": i, "logps": [lp for (lp,) in values]} for i, values in zip(ids, logps, strict=True)]

        trainer.add_callback(sampled_by := SampledBy(colocate, complete))
    if benchmark is not None:
        rewards = greedy_rewards(trainer, make_prompts(benchmark), 4)
        if trainer.accelerator.is_main_process:
            Path(config.output_dir).mkdir(parents=True, exist_ok=True)
            Path(config.output_dir, "greedy.json").write_text(json.dumps(rewards))
    if kill_at is not None:
        trainer.add_callback(Kill(kill_at))
    if server is not None and trainer.accelerator.is_main_process:
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
        generation = trainer.vllm_generation
        Path(config.output_dir, "sync_folder.txt").write_text(str(generation._folder(generation._run)))
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    value = trainer.lagrange_multiplier.value
    values = trainer.accelerator.gather(torch.tensor([value], dtype=torch.float64)).tolist()
    if trainer.accelerator.is_main_process:
        logs = {"rows": trainer.state.log_history, "lambda": values, "kind": str(trainer.accelerator.distributed_type)}
        if colocate is not None:
            logs["gaps"] = sampled_by.gaps
            logs["scales"] = scales_after_sleep(trainer.vllm_generation.llm)
        Path(config.output_dir, "logs.json").write_text(json.dumps(logs))
    return trainer


def main() -> None:
    for options in sys.argv[1:]:
        trainer = train(json.loads(options))
    # See scripts/train.py: gloo's thread lets go of the last gather.
    time.sleep(1)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
