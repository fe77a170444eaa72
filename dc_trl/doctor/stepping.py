"""A trainer whose rollouts cost nothing, for the time of its steps."""

import itertools
import random
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback

from ..calibration.rollouts import Rollout
from ..calibration.scoring import train_logps
from ..calibration.settings import CalibrationSettings
from ..config import DCGRPOConfig
from ..trainer import DCGRPOTrainer


PROMPTS, SAMPLES, LENGTH, STEPS = 2, 8, 48, 2
_NOISE = 0.05  # of log-probabilities, nats: about what an FP8 engine has


class StepClock(TrainerCallback):
    """Mean seconds of the steps of one `train` call."""

    seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.device.type != "cpu":
            torch.accelerator.synchronize(args.device)
        self.seconds += (time.perf_counter() - self._start) / STEPS


class Replay:
    """A rollout function: the same random completions at every call, with log-probabilities close to the policy's.

    Args:
        policy, tokenizer: of the training.
        texts: all prompts that there are.
    """

    __name__ = "replay"

    def __init__(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]):
        rng = random.Random(0)
        last = min(len(tokenizer), 10_000) - 1
        self._prompts = dict(zip(texts, tokenizer(texts)["input_ids"], strict=True))
        numbers = [number for number in range(len(texts)) for _ in range(SAMPLES)]
        rollouts = [Rollout(n, [rng.randint(10, last) for _ in range(LENGTH)], [0.0] * LENGTH, True) for n in numbers]
        settings = CalibrationSettings(progress=False)
        scored = train_logps(policy, list(self._prompts.values()), rollouts, settings)
        self._completions: dict[str, list[tuple[list[int], list[float]]]] = {text: [] for text in texts}
        for rollout, logps in zip(rollouts, scored, strict=True):
            noisy = [min(logp + rng.gauss(0, _NOISE), 0.0) for logp in logps.tolist()]
            self._completions[texts[rollout.prompt]].append((rollout.ids, noisy))

    def __call__(self, prompts: list[str], trainer: DCGRPOTrainer) -> dict[str, list]:
        """The completions of a batch, each prompt's own in turn."""
        turns = {text: itertools.cycle(completions) for text, completions in self._completions.items()}
        completions = [next(turns[text]) for text in prompts]
        return {
            "prompt_ids": [self._prompts[text] for text in prompts],
            "completion_ids": [ids for ids, _ in completions],
            "logprobs": [logps for _, logps in completions],
        }


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Rewards that differ within a group."""
    return [float(number % 7) for number in range(len(completions))]


def make_trainer(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, constraint: Any, folder: str, device: str
) -> tuple[DCGRPOTrainer, StepClock]:
    """A trainer of a few optimizer steps, with or without the constraint, and its clock."""
    config = DCGRPOConfig(
        folder,
        constraint=constraint,
        use_cpu=device == "cpu",
        bf16=device.startswith("cuda"),
        gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=LENGTH,
        max_steps=STEPS,
        learning_rate=1e-6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1000,
    )
    clock = StepClock()
    texts = [f"{number}+{number}=" for number in range(PROMPTS)]
    trainer = DCGRPOTrainer(
        policy,
        reward,
        config,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
        rollout_func=Replay(policy, tokenizer, texts),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, clock
