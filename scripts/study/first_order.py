"""Where each form of the constraint pushes a policy: mismatch, entropy and reward for a unit of movement.

    python scripts/study/first_order.py     with a sampler that lags by 8 optimizer steps, and with one in step

Each seed trains the tiny model by GRPO for `--steps` optimizer steps. Then a small step is taken along each direction
alone, with the second moments of the run's own optimizer. What changes is computed over the whole vocabulary, on
contexts that the gradient has not seen, and divided by how far the step moves the policy: forms whose λ have different
units can then be compared. RESULTS.md has the table.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from comparisons import mean_over_seeds
from one_run import completion_config, policy_completions, prompt_ids, rewards_of
from own_forms import complete
from sweeps import BASE_FILE, SWEEPS
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PrinterCallback, set_seed

from dc_trl import DCGRPOConfig, DCGRPOTrainer
from dc_trl.constraint.corrections import CORRECTIONS
from dc_trl.constraint.forms import injected, log_ratio, quadratic
from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.files import read_yaml
from dc_trl.grading.rewards import arithmetic_reward
from dc_trl.records.tables import markdown_table, with_error
from dc_trl.sampled_tokens import SampledTokens
from dc_trl.settings.command_line import OptionParser


MOVEMENT = 1e-3  # of a step: mean total variation between the policy before and after, over contexts
HEAD = ["direction", "total variation", "KL(π ‖ q)", "E_π |π − q|", "entropy", "reward"]
OF_DATA = ("model_name_or_path", "dtype", "dataset_name", "eval_size", "eval_greedy", "rewards")


class Batch(NamedTuple):
    """Sampled completions, the tokens right-padded.

    Args:
        ids: prompts and completions, shape (B, L).
        attended: whether a token is one of them, shape (B, L), int64.
        scored: whether it is one of a completion, shape (B, L − 1): entry t is about the token at t + 1.
        infer_logps: the sampler's log-probability of that token, shape (B, L − 1), nats; 0 where not scored.
        rewards: shape (B,).
        advantages: normalised within the completions of a prompt, shape (B, 1).
    """

    ids: Tensor
    attended: Tensor
    scored: Tensor
    infer_logps: Tensor
    rewards: Tensor
    advantages: Tensor


# From sampled tokens to the weight of each token's score function, shape (B, L − 1).
Direction = Callable[[SampledTokens], Tensor]


def along_reward(tokens: SampledTokens, correction: str | None = None) -> Tensor:
    """Weigh tokens by Â, corrected as `rollout_correction` does by default."""
    return tokens.token_advantages * (1.0 if correction is None else CORRECTIONS[correction](tokens))


def along_form(tokens: SampledTokens, coefficient: Callable[..., Tensor]) -> Tensor:
    """Weigh tokens as a form of the constraint does with λ = 1."""
    return -coefficient(tokens, measure="prob_diff")


DIRECTIONS: dict[str, Direction] = {
    "GRPO's reward": along_reward,
    **{f"reward, {name}": partial(along_reward, correction=name) for name in ("token_truncate", "ppo_clip")},
    "injected": partial(along_form, coefficient=injected),
    "complete": partial(along_form, coefficient=complete),
    "quadratic": partial(along_form, coefficient=quadratic),
    "log_ratio": partial(along_form, coefficient=log_ratio),
}


def first_order(trainer: DCGRPOTrainer, batch: Batch, contexts: Batch, follows: bool) -> dict[str, list[float]]:
    """Return the changes along each direction for a unit of movement, in the order of `HEAD`.

    Args:
        trainer: at the weights that the question is about, with a replica and one optimizer step behind it at least.
            Its weights are put back.
        batch: completions of the replica, which give the directions.
        contexts: completions of the policy, of other problems.
        follows: whether the sampler takes the new weights over, quantized, as in a run without a lag.
    """
    model, replica = trainer.model, trainer.replica
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sampled_with = {name: tensor.clone() for name, tensor in replica.model.state_dict().items()}
    policy, before = log_probs(model, contexts), measures(model, replica.model, contexts)
    tokens = token_logps(model, contexts).detach()
    found = {}
    for name, direction in DIRECTIONS.items():
        logps = token_logps(model, batch)
        tokens_of_batch = SampledTokens(logps.detach(), batch.infer_logps, batch.scored.bool(), batch.advantages)
        weights = direction(tokens_of_batch) * batch.scored
        gradient = torch.autograd.grad((weights * logps).sum() / batch.scored.sum(), parameters)
        moments = [trainer.optimizer.state[parameter]["exp_avg_sq"] for parameter in parameters]
        steps = [g / (moment.sqrt() + 1e-8) for g, moment in zip(gradient, moments, strict=True)]
        scale = MOVEMENT / torch.stack([step.norm() for step in steps]).norm().clamp(min=1e-30).item()
        for _ in range(3):  # the movement is nearly linear in the step: two corrections suffice
            with _moved(parameters, steps, scale):
                scale *= MOVEMENT / max(distance(log_probs(model, contexts), policy), 1e-30)
        with _moved(parameters, steps, scale):
            if follows:
                replica.sync(model)
            after, moved = measures(model, replica.model, contexts), distance(log_probs(model, contexts), policy)
            drift = ((token_logps(model, contexts).detach() - tokens) * contexts.scored).sum(1)
            if follows:
                replica.model.load_state_dict(sampled_with)
        reward = ((contexts.rewards - contexts.rewards.mean()) * drift).mean().item()
        found[name] = [change / moved for change in [*(after - before).tolist(), reward]]
    return found


@contextmanager
def _moved(parameters: Sequence[Tensor], steps: Sequence[Tensor], scale: float) -> Iterator[None]:
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter, step in zip(parameters, steps, strict=True):
            parameter += scale * step
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)


def token_logps(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return log-probabilities of the tokens that follow, shape (B, L − 1), with a gradient."""
    logits = model(input_ids=batch.ids, attention_mask=batch.attended).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, batch.ids[:, 1:, None]).squeeze(2)


@torch.no_grad()
def log_probs(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return log-probabilities of the whole vocabulary where a completion's token follows, shape (N, V), float64."""
    logits = model(input_ids=batch.ids, attention_mask=batch.attended).logits[:, :-1]
    return logits[batch.scored].double().log_softmax(-1)


def distance(first: Tensor, second: Tensor) -> float:
    """Return the total variation between distributions with these log-probabilities, shape (N, V); the mean over N."""
    return (first.exp() - second.exp()).abs().sum(1).mean().item() / 2


def measures(model: PreTrainedModel, sampler: PreTrainedModel, batch: Batch) -> Tensor:
    """Return total variation, KL(π ‖ q), E_π |π − q| and the policy's entropy, means over contexts, shape (4,)."""
    policy, sampled = log_probs(model, batch), log_probs(sampler, batch)
    p, gap = policy.exp(), (policy.exp() - sampled.exp()).abs()
    values = gap.sum(1) / 2, (p * (policy - sampled)).sum(1), (p * gap).sum(1), -(p * policy).sum(1)
    return torch.stack([value.mean() for value in values])


def sampled_batch(trainer: DCGRPOTrainer, rows: Sequence[Mapping], by_policy: bool, completions: int) -> Batch:
    """Sample completions of problems at temperature 1, by the policy (transformers' `generate`) or by the replica."""
    tokenizer = trainer.processing_class
    repeated = [dict(row) for row in rows for _ in range(completions)]
    prompts, config = prompt_ids(trainer, repeated), completion_config(trainer, temperature=1.0, top_k=0)
    if by_policy:
        ends = set(trainer.eos_token_ids)
        sampled = [_until_end(ids, ends) for ids in policy_completions(trainer, prompts, config)]
        logps = [[0.0] * len(ids) for ids in sampled]
    else:
        sampled, logps = trainer.replica.generate(prompts, config, 1.0)
    rewards = torch.tensor(rewards_of(trainer, arithmetic_reward, repeated, sampled), dtype=torch.float32)
    groups = rewards.view(-1, completions)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)

    def padded(sequences: Iterator[Tensor], value: int = 0) -> Tensor:
        return pad_sequence(list(sequences), batch_first=True, padding_value=value)

    pairs = list(zip(prompts, sampled, strict=True))
    scored = padded(torch.arange(len(prompt + ids)) >= len(prompt) for prompt, ids in pairs)
    infer = padded(torch.tensor([0.0] * len(prompt) + row) for prompt, row in zip(prompts, logps, strict=True))
    return Batch(
        ids=padded((torch.tensor(prompt + ids) for prompt, ids in pairs), tokenizer.pad_token_id),
        attended=padded(torch.ones(len(prompt + ids), dtype=torch.long) for prompt, ids in pairs),
        scored=scored[:, 1:],
        infer_logps=infer[:, 1:],
        rewards=rewards,
        advantages=advantages.view(-1, 1),
    )


def _until_end(ids: list[int], ends: set[int]) -> list[int]:
    """Up to and with the first end token."""
    return ids[: next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))]


def changes(seed: int, steps: int, lag: int, learning_rate: float) -> dict[str, list[float]]:
    """Return the changes of one run, whose sampler has the weights of `lag` steps ago; 0: the present ones."""
    base = read_yaml(SWEEPS / BASE_FILE)
    fields = {name: value for name, value in base.items() if name not in OF_DATA and not name.startswith("eval_")}
    fields |= {"export_run": False, "max_steps": steps, "seed": seed, "learning_rate": learning_rate}
    with tempfile.TemporaryDirectory(prefix="dc_trl-first-order-") as folder:
        trainer = DCGRPOTrainer(
            base["model_name_or_path"],
            arithmetic_reward,
            DCGRPOConfig(
                folder, model_init_kwargs={"dtype": base["dtype"]}, **fields | {"weight_sync_steps": max(1, lag)}
            ),
            train_dataset=arithmetic_dataset(16 * steps, seed, "train"),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    trainer.model.eval()
    if lag == 0:
        trainer.replica.sync(trainer.model)
    set_seed(1000 + seed)
    batch = sampled_batch(trainer, arithmetic_dataset(64, 1000 + seed, "train"), by_policy=False, completions=8)
    contexts = sampled_batch(trainer, arithmetic_dataset(128, seed, "held_out"), by_policy=True, completions=4)
    return first_order(trainer, batch, contexts, follows=lag == 0)


def main() -> None:
    parser = OptionParser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps before the question; at most the lag")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for lag, title in ((args.steps, f"a sampler that lags by {args.steps} steps"), (0, "a sampler in step")):
        found = [changes(seed, args.steps, lag, args.learning_rate) for seed in range(args.seeds)]
        rows = []
        for name in DIRECTIONS:
            means = [mean_over_seeds(values) for values in zip(*(each[name] for each in found), strict=True)]
            rows.append([name, *(with_error(mean.value, mean.standard_error, 1, 3, "+") for mean in means)])
        print(f"Change for each unit of movement, {title}, {args.seeds} seeds\n\n{markdown_table(HEAD, rows)}")


if __name__ == "__main__":
    main()
