"""Checks that no run starts without: a policy that learns, rows that fit it, and finite rewards; see `dc_trl.gate`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from accelerate.logging import get_logger
from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import ProcessorMixin

from ..config import DCGRPOConfig
from ..gate.fit import Limits, limits_of
from ..gate.policy import require_trainable, warn_of_rounding
from ..gate.rows import Rows
from ..gate.start import require_startable
from ..quantization.policy import base_model
from ..settings.distribution import sharding_of
from ..settings.paths import shipped
from ..settings.reward_functions import checked_reward, excerpt, require_finite
from ..trl_hooks import HookedTrainer
from .required_servers import config_of, require_servers


logger = get_logger(__name__)

# Arguments of the trainer that are checked before a model is loaded.
_BEFORE = (
    *("train_dataset", "eval_dataset", "processing_class", "peft_config", "quantization_config", "rollout_func"),
    "environment_factory",
)


def require_comparable(args: DCGRPOConfig, own_rollouts: bool) -> None:
    """Refuse settings for which the engines cannot be compared, or the policy not be copied, with these rollouts.

    Args:
        args: settings of the run.
        own_rollouts: whether a `rollout_func` samples.

    Raises:
        ValueError: names the setting, its value and the remedy.
    """
    if args.routing_replay and own_rollouts:
        raise ValueError(
            "routing_replay=True needs the experts that the engine chose, which a rollout_func does not return: "
            "omit rollout_func, or set routing_replay=False."
        )
    scheme, needy = args.deployment_scheme, args.compared_by
    sharding = sharding_of(args)
    if sharding.kind is not None and args.score_centering:
        raise ValueError(
            f"score_centering=True reads whole parameters of the output head, which {sharding} divides: launch "
            "without sharding (DDP), or set score_centering=False."
        )
    if sharding.kind == "DEEPSPEED" and sharding.level == 3 and args.truncations:
        raise ValueError(
            f"top_p, top_k and min_p need the whole output head for the kept tokens, which {sharding} divides: sample "
            "without truncation, or launch with FSDP2 or DDP."
        )
    if needy is not None and not args.use_vllm and scheme is None and not own_rollouts:
        raise ValueError(
            f"{needy}={getattr(args, needy)!r} needs the rollouts' log-probabilities, and model.generate returns "
            "none: set deployment_scheme (for example 'fp8') to sample from an in-process replica, use_vllm=True, "
            f"or {args.without_comparison}."
        )
    if scheme is None or args.use_vllm:
        return
    if own_rollouts:
        raise ValueError(
            f"deployment_scheme={scheme!r} samples from the in-process replica and contradicts rollout_func: pass "
            "one of the two."
        )
    if sharding.divides_parameters and not sharding.is_fsdp2:
        raise ValueError(
            f"deployment_scheme={scheme!r} copies the policy into a replica, and {sharding} gives no whole "
            "parameters to copy: launch with FSDP2 (fsdp_version: 2) or without sharding, or set use_vllm=True."
        )


class Gate:
    """The checks of a trainer's arguments before its model is loaded, of the loaded model, and of each batch.

    Args:
        model, reward_funcs, args, others: arguments of the trainer, the last by name.

    Attributes:
        model: the model that the trainer loads.

    Raises:
        ValueError, TypeError: an argument would train nothing or does not fit the others.
    """

    def __init__(self, model: Any, reward_funcs: Any, args: DCGRPOConfig, others: Mapping[str, Any]):
        self.model: Any = shipped(model) if isinstance(model, str) else model
        arguments: dict[str, Any] = {name: others.get(name) for name in _BEFORE}
        self._shown = require_startable(model=self.model, reward_funcs=reward_funcs, args=args, **arguments)
        self._sharding = sharding_of(args)
        if args.use_vllm and args.vllm_mode == "server":
            require_servers(args, config_of(self.model, args))
        self._limits: Limits | None = None  # what the policy can read, once it is loaded

    def require_fit(self, trainer: HookedTrainer) -> None:
        """Refuse a loaded policy that would not learn, or does not fit tokenizer, prompts and rewards.

        The reward functions of the trainer check their results from now on.

        Raises:
            ValueError: the policy or a reward model is refused; the message says why, with the remedy.
        """
        args, policy = trainer.args, trainer.model
        moving = require_trainable(policy)
        optimizer, rate = str(args.optim), args.learning_rate
        if trainer.optimizer is not None:
            groups = trainer.optimizer.param_groups
            optimizer = type(trainer.optimizer).__name__
            rate = max(float(group.get("initial_lr", group["lr"])) for group in groups)
        warn_of_rounding(moving, optimizer, rate, self._sharding, args.bf16 or args.fp16)
        if not isinstance(trainer.processing_class, ProcessorMixin):  # images become tokens that are not in the text
            context = args.vllm_max_model_length if args.use_vllm else None
            self._limits = limits_of(
                base_model(policy), trainer.text_tokenizer, "the model", trainer.max_completion_length, context
            )
            if trainer.rollout_func is None and trainer.environment_factories is None:  # they make tokens or prompts
                self._check_prompts(trainer, self._shown)
        self._check_rewards(trainer)

    def _check_prompts(self, trainer: HookedTrainer, shown: list[Rows]) -> None:
        assert self._limits is not None
        for name, rows in shown:
            numbers, prompts = list(rows), [row["prompt"] for row in rows.values()]
            words = partial(_row_of, name, numbers)
            self._limits.warn(trainer.tokenize(prompts, words)[0], words)

    def _check_rewards(self, trainer: HookedTrainer) -> None:
        trainer.reward_funcs = [
            function if isinstance(function, nn.Module) else checked_reward(function, name)
            for function, name in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
        ]
        if not trainer.reward_weights.any():
            logger.warning(
                f"reward_weights={trainer.reward_weights.tolist()}: all advantages will be 0, so nothing is learned. "
                "Give at least one reward another weight."
            )

    # --- checks of each batch ---------------------------------------------------------------------------------------

    def tokenize(
        self,
        tokenize: Callable[[list], tuple],
        processing_class: Any,
        prompts: list,
        named: Callable[[int], str] | None,
    ) -> tuple:
        """Return what `tokenize` returns for prompts, if the policy can read them.

        Args:
            tokenize: function of TRL, whose first result is the token ids.
            processing_class: tokenizer or processor.
            prompts: plain or conversational prompts.
            named: returns the name of a prompt from its number; by default its first words.

        Raises:
            ValueError: a prompt cannot be rendered or read; the message names it.
        """
        named = named or (lambda number: f"the prompt {excerpt(prompts[number])}")
        try:
            tokenized = tokenize(prompts)
        except TemplateError as error:
            raise ValueError(
                f"{named(0)}, or a later one, cannot be rendered by the tokenizer's chat template: {error}."
            ) from error
        if self._limits is not None:
            self._limits.require(tokenized[0], named)
        return tokenized

    @staticmethod
    def require_finite_rewards(trainer: HookedTrainer, rewards: Tensor) -> None:
        """Refuse rewards of models, and weighted sums, that are not finite; functions are checked when they return.

        Args:
            trainer: trainer of the rewards.
            rewards: shape (N, functions), NaN where there is none.

        Raises:
            ValueError: one is not finite.
        """
        for function, name, column in zip(trainer.reward_funcs, trainer.reward_func_names, rewards.T, strict=True):
            if isinstance(function, nn.Module):
                require_finite(f"the reward model {name!r}", column)
        weighted = rewards.nan_to_num(0.0) * trainer.reward_weights.to(rewards.device)
        require_finite(f"reward_weights={trainer.reward_weights.tolist()}: the weighted sum", weighted.sum(1))


def _row_of(name: str, numbers: list[int], number: int) -> str:
    return f"{name}: the prompt of row {numbers[number]}"
