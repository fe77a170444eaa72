"""How much of what a remedy acts on is what training did: each part of the discrepancy beside the true drift.

    python scripts/study/lag_signal.py --schemes fp8 int4 bf16

A model trains by GRPO with a sampler that lags. At the ages asked for, each of these is compared, token by token, with
the true drift, log p − log p_s by another copy of the model in float32:

    whole            log p − log q, what `constraint_target: all` acts on
    lag              log p − log p_s in the trainer's own precision, what `constraint_target: lag` acts on
    lag, deployed    the same by the deployed forward, in which a policy computes with `train_through_quantization`

Its gradient is that of the pull λ·x·∇ log p at λ 0.5, over the norm of the policy's own gradient.
"""

import tempfile
from collections import defaultdict
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import sequences
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from dc_trl import DCGRPOConfig, DCGRPOTrainer
from dc_trl.constraint.settings import DEFAULT_MULTIPLIERS
from dc_trl.quantization.deployed_forward import DeployedForward
from dc_trl.records.tables import markdown_table
from dc_trl.sampled_tokens import loss_mask
from dc_trl.settings.command_line import OptionParser


LAMBDA, _ = DEFAULT_MULTIPLIERS["log_ratio"]  # of `recipe: lag`
HEAD = ["age", "what is acted on", "k3", "std", "its gradient / the policy's", "correlation with the drift"]


class Measured(DCGRPOTrainer):
    """Compares the parts of each batch of certain ages before it trains on it."""

    def __init__(self, *args: Any, scheme: str, ages: list[int], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.deployed = DeployedForward(self.model, scheme)
        self.in_float32 = AutoModelForCausalLM.from_config(self.model.config, dtype=torch.float32)
        self.ages, self.rows = ages, list[list[Any]]()

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.model.training and self.sampler.age in self.ages:
            self.measure(inputs)
        return super()._compute_loss(model, inputs)

    def lag(self, inputs: dict[str, Any], deployed: bool = False) -> Tensor:
        with torch.no_grad(), self.deployed.active(deployed):
            present = logps_of(self.model, inputs)
            with self.sampler.sampling_weights():
                return present - logps_of(self.model, inputs)

    @torch.no_grad()
    def drift(self, inputs: dict[str, Any]) -> Tensor:
        """Return the lag by another copy of the model: accelerate wraps the policy's forward in autocast."""
        self.in_float32.load_state_dict(self.model.state_dict())
        present = logps_of(self.in_float32, inputs)
        with self.sampler.sampling_weights():
            self.in_float32.load_state_dict(self.model.state_dict())
        return present - logps_of(self.in_float32, inputs)

    def norm(self, inputs: dict[str, Any], coefficients: Tensor) -> float:
        """Return the norm of the gradient of the mean of coefficient · log p."""
        objective = (coefficients * logps_of(self.model, inputs)).mean()
        gradients = torch.autograd.grad(objective, list(self.model.parameters()))
        return float(torch.stack([gradient.norm() for gradient in gradients]).norm())

    def measure(self, inputs: dict[str, Any]) -> None:
        scored = loss_mask(inputs).bool()
        drift = self.drift(inputs)
        with torch.no_grad():
            whole = logps_of(self.model, inputs) - inputs["sampling_per_token_logps"][scored]
        parts = {
            "whole": whole,
            "lag": self.lag(inputs),
            "lag, deployed": self.lag(inputs, deployed=True),
            "true drift": drift,
        }
        advantages = inputs["advantages"].unsqueeze(1).expand(scored.shape)[scored]
        of_policy = self.norm(inputs, advantages)
        for name, part in parts.items():
            k3 = (torch.expm1(part) - part).mean().item()
            share = LAMBDA * self.norm(inputs, part) / of_policy
            correlation = torch.corrcoef(torch.stack([part, drift]))[0, 1].item()
            self.rows.append([name, self.sampler.age, k3, part.std().item(), share, correlation])


def logps_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return log p of the scored tokens of a batch, nats, shape (tokens,), by the model's own forward."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    width = inputs["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1].float()
    chosen = logits.log_softmax(-1).gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
    return chosen[loss_mask(inputs).bool()]


def main() -> None:
    parser = OptionParser(__doc__)
    parser.add_argument("--model", default="runs/sequences/model", help="(default: runs/sequences/model)")
    parser.add_argument("--schemes", nargs="+", default=["fp8", "int4", "bf16"], help="(default: fp8 int4 bf16)")
    parser.add_argument("--ages", nargs="+", type=int, default=[1, 2, 4, 8], help="(default: 1 2 4 8)")
    parser.add_argument("--learning_rates", nargs="+", type=float, default=[5e-5], help="(default: 5e-5)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="(default: 0)")
    parser.add_argument("--threads", type=int, default=1, help="(default: 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"One batch of each age and seed, SmolLM2-135M, seeds {args.seeds}; means over seeds.\n")
    for rate in args.learning_rates:
        for scheme in args.schemes:
            rows = []
            found: dict[tuple[int, str], list[list[float]]] = defaultdict(list)
            for seed in args.seeds:
                for name, age, *values in measured(args, scheme, rate, seed):
                    found[age, name].append(values)
            for (age, name), values in found.items():
                means = [sum(column) / len(column) for column in zip(*values, strict=True)]
                rows.append([str(age), name, *(f"{mean:.2g}" for mean in means)])
            print(f"{scheme}, learning rate {rate:g}:\n\n{markdown_table(HEAD, rows)}\n", flush=True)


def measured(args: Any, scheme: str, rate: float, seed: int) -> list[list[Any]]:
    """Return what a run found: name and age, k3, standard deviation, share of the gradient, correlation."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Measured(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            reward_funcs=[sequences.continues_the_sequence],
            args=DCGRPOConfig(
                folder,
                deployment_scheme=scheme,
                discrepancy_split=True,
                bf16=True,
                use_cpu=True,
                gradient_checkpointing=False,
                per_device_train_batch_size=64,
                num_generations=8,
                max_completion_length=4,
                max_steps=max(args.ages) + 1,
                weight_sync_steps=max(args.ages) + 1,
                learning_rate=rate,
                lr_scheduler_type="constant",
                save_strategy="no",
                report_to="none",
                export_run=False,
                disable_tqdm=True,
                logging_strategy="no",
                seed=seed,
            ),
            train_dataset=Dataset.from_list(sequences.sequence_problems(844, seed=0)),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            scheme=scheme,
            ages=args.ages,
        )
        trainer.remove_callback(PrinterCallback)
        with redirect_stdout(StringIO()):  # the verdict on a run of a few steps
            trainer.train()
        return trainer.rows


if __name__ == "__main__":
    main()
