"""Checks that no run starts without: a policy that learns, rows that fit it, and finite rewards; see `dc_trl.gate`."""

from functools import partial
from typing import Any

from accelerate.logging import get_logger
from jinja2 import TemplateError
from torch import nn
from transformers import PreTrainedModel, ProcessorMixin
from trl import GRPOTrainer

from ..config import DCGRPOConfig
from ..gate.fit import Limits, limits_of, require_reward_model, require_template
from ..gate.policy import require_trainable, require_whole, warn_of_rounding
from ..gate.rows import Rows
from ..gate.start import require_startable
from ..quantization.policy import base_model
from ..settings.distribution import sharding_of
from ..settings.paths import shipped
from ..settings.reward_functions import checked_reward, excerpt, require_finite


logger = get_logger(__name__)

# Arguments of the constructor that are checked before a model is loaded.
_BEFORE = (
    *("train_dataset", "eval_dataset", "processing_class", "peft_config", "quantization_config", "rollout_func"),
    "environment_factory",
)


class GatedTrainer(GRPOTrainer):
    """TRL's GRPO trainer that refuses arguments which would train nothing; see [`DCGRPOTrainer`].

    Subclasses build their engines after this constructor.
    """

    reward_funcs: list[Any]  # TRL's attribute
    _engine_context: int | None = None  # the engine's limit of tokens of prompt and completion
    _limits: Limits | None = None  # what the policy can read, once it is loaded

    def __init__(self, model, reward_funcs, args: DCGRPOConfig, *positional, **kwargs):
        by_name = isinstance(model, str)
        model = shipped(model) if by_name else model
        arguments: dict[str, Any] = {name: kwargs.get(name) for name in _BEFORE}
        shown = require_startable(model=model, reward_funcs=reward_funcs, args=args, **arguments)
        self._require_engine(model, args)
        scoring = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        scoring_by_name = [isinstance(each, str) for each in scoring]
        if not by_name:  # transformers fails on some defects with another error
            require_whole(model, "model", False, sharding_of(args))
        try:
            super().__init__(model, reward_funcs, args, *positional, **kwargs)
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise ValueError(
                "model, or a reward model: its weights have other shapes than in its config.json (the report above "
                "names them): copy or save it again."
            ) from error
        if by_name:
            require_whole(self.model, "model", True, sharding_of(args))
        self._require_fit(shown)
        self._check_rewards(scoring_by_name)

    def _require_engine(self, model: Any, args: DCGRPOConfig) -> None:
        """Refuse an engine that is missing or does not fit, before the model is loaded."""

    def _require_fit(self, shown: list[Rows]) -> None:
        """Refuse a policy that would not learn, or that does not fit the tokenizer and the prompts.

        Args:
            shown: rows of the data sets to check.

        Raises:
            ValueError: the policy is refused; the message says why, with the remedy.
        """
        args, policy, sharding = self.args, self.model, sharding_of(self.args)
        moving = require_trainable(policy, self.optimizer, args.learning_rate)
        optimizer, rate = str(args.optim), args.learning_rate
        if self.optimizer is not None:
            groups = self.optimizer.param_groups
            optimizer = type(self.optimizer).__name__
            rate = max(float(group.get("initial_lr", group["lr"])) for group in groups)
        warn_of_rounding(moving, optimizer, rate, sharding, args.bf16 or args.fp16)
        if isinstance(self.processing_class, ProcessorMixin):
            return  # images become tokens that are not in the text
        self._limits = limits_of(
            base_model(policy), self._tokenizer, "the model", self.max_completion_length, self._engine_context
        )
        if self.rollout_func is not None or self.environment_factories is not None:
            return  # they make their own tokens or prompts
        for name, rows in shown:
            numbers, prompts = list(rows), [row["prompt"] for row in rows.values()]
            words = partial(_row_of, name, numbers)
            self._limits.warn(self._tokenize(prompts, words)[0], words)

    def _check_rewards(self, by_name: list[bool]) -> None:
        """Check reward models now, and wrap reward functions so that their results are checked.

        Args:
            by_name: whether each of the user's rewards was given by name.

        Raises:
            ValueError: a reward model has missing or invalid weights, or its tokenizer does not fit it.
        """
        functions = zip(self.reward_funcs, self.reward_processing_classes, self.reward_func_names, strict=True)
        checked: list[Any] = []
        for number, (function, tokenizer, name) in enumerate(functions):
            if isinstance(function, PreTrainedModel):
                require_whole(function, f"the reward model {name!r}", by_name[number], sharding_of(self.args))
                require_reward_model(function, tokenizer, name)
            checked.append(function if isinstance(function, nn.Module) else checked_reward(function, name))
        self.reward_funcs = checked
        if not self.reward_weights.any():
            logger.warning(
                f"reward_weights={self.reward_weights.tolist()}: all advantages will be 0, so nothing is learned. "
                "Give at least one reward another weight."
            )

    # --- checks of each batch ----------------------------------------------------------------------------------------

    def _tokenize_prompts(self, prompts):
        return self._tokenize(prompts, lambda number: f"the prompt {excerpt(prompts[number])}")

    def _tokenize(self, prompts, named):
        """Return token ids of prompts that the policy can read; `named` returns a prompt's name from its number."""
        require_template(self.processing_class, prompts, named)
        try:
            tokenized = super()._tokenize_prompts(prompts)
        except TemplateError as error:
            raise ValueError(
                f"{named(0)}, or a later one, cannot be rendered by the tokenizer's chat template: {error}."
            ) from error
        if self._limits is not None:
            self._limits.require(tokenized[0], named)
        return tokenized

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        # Functions are checked when they return; this checks the reward models and the weighted sums.
        for function, name, column in zip(self.reward_funcs, self.reward_func_names, rewards.T, strict=True):
            if isinstance(function, nn.Module):
                require_finite(f"the reward model {name!r}", column)
        weighted = rewards.nan_to_num(0.0) * self.reward_weights.to(rewards.device)
        require_finite(f"reward_weights={self.reward_weights.tolist()}: the weighted sum", weighted.sum(1))
        return rewards


def _row_of(name: str, numbers: list[int], number: int) -> str:
    return f"{name}: the prompt of row {numbers[number]}"
