"""A training run in a process of its own: `python -m tests.worker '{"output_dir": …, …}'`.

Options beside those of DCGRPOConfig: `rollouts` (known rollouts instead of the replica), `kill_at` (the step after
which the process kills itself, as a power cut would). The main process writes `logs.json` into the output directory.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback

from dc_trl import DCGRPOTrainer, LambdaLoggingCallback

from .helpers import Rollouts, distinct_characters, make_config, make_model, make_prompts, make_tokenizer


class Kill(TrainerCallback):
    def __init__(self, step: int):
        self._step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    options = json.loads(sys.argv[1])
    kill_at, rollouts = options.pop("kill_at", None), options.pop("rollouts", False)
    config = make_config(**options)
    trainer = DCGRPOTrainer(
        make_model(128),
        distinct_characters,
        config,
        train_dataset=make_prompts(),
        processing_class=make_tokenizer(),
        rollout_func=Rollouts() if rollouts else None,
        callbacks=[LambdaLoggingCallback()],
    )
    if kill_at is not None:
        trainer.add_callback(Kill(kill_at))
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    value = trainer.lagrange_multiplier.value
    values = trainer.accelerator.gather(torch.tensor([value], dtype=torch.float64)).tolist()
    if trainer.accelerator.is_main_process:
        logs = {"rows": trainer.state.log_history, "lambda": values, "kind": str(trainer.accelerator.distributed_type)}
        Path(config.output_dir, "logs.json").write_text(json.dumps(logs))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
