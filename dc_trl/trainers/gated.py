"""What no run begins without: a policy that learns, rows that fit it, rewards that are numbers; see `dc_trl.gate`."""

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

# Arguments of the constructor that are looked at before a model is loaded.
_BEFORE = (
    *("train_dataset", "eval_dataset", "processing_class", "peft_config", "quantization_config", "rollout_func"),
    "environment_factory",
)


class GatedTrainer(GRPOTrainer):
    """TRL's GRPO trainer that refuses what would train nothing; see [`DCGRPOTrainer`].

    A subclass builds its engines after this constructor.
    """

    reward_funcs: list[Any]  # TRL's
    _engine_context: int | None = None  # tokens of prompt and completion that an engine is limited to
    _limits: Limits | None = None  # what the policy can read, once it is loaded

    def __init__(self, model, reward_funcs, args: DCGRPOConfig, *positional, **kwargs):
        by_name = isinstance(model, str)
        model = shipped(model) if by_name else model
        arguments: dict[str, Any] = {name: kwargs.get(name) for name in _BEFORE}
        shown = require_startable(model=model, reward_funcs=reward_funcs, args=args, **arguments)
        self._require_engine(model, args)
        scoring = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        scoring_by_name = [isinstance(each, str) for each in scoring]
        if not by_name:  # transformers trips over some of them
            require_whole(model, "model", False, sharding_of(args))
        try:
            super().__init__(model, reward_funcs, args, *positional, **kwargs)
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise ValueError(
                "model, or a reward model: its weights have other shapes than its config.json says (the report above "
                "has their names): copy or save it again."
            ) from error
        if by_name:
            require_whole(self.model, "model", True, sharding_of(args))
        self._require_fit(shown)
        self._check_rewards(scoring_by_name)

    def _require_engine(self, model: Any, args: DCGRPOConfig) -> None:
        """Refuses an engine that is not there or does not fit, before the model is loaded."""

    def _require_fit(self, shown: list[Rows]) -> None:
        """Refuses a policy that would not learn, or that tokenizer and prompts do not fit.

        Args:
            shown: rows of the data sets.

        Raises:
            ValueError: names what is wrong and the remedy.
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
            return  # images are read as tokens that are not in the text
        self._limits = limits_of(
            base_model(policy), self._tokenizer, "the model", self.max_completion_length, self._engine_context
        )
        if self.rollout_func is not None or self.environment_factories is not None:
            return  # which make tokens or prompts of their own
        for name, rows in shown:
            numbers, prompts = list(rows), [row["prompt"] for row in rows.values()]
            words = partial(_row_of, name, numbers)
            self._limits.warn(self._tokenize(prompts, words)[0], words)

    def _check_rewards(self, by_name: list[bool]) -> None:
        """Has what scores be looked at: reward models now, functions whenever they return.

        Args:
            by_name: whether each of the user's was given by name.

        Raises:
            ValueError: a reward model is not whole, or its tokenizer does not fit it.
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
                f"reward_weights={self.reward_weights.tolist()}: all advantages will be 0, and no reward teaches "
                "anything. Give one of them another weight."
            )

    # --- what is looked at again, batch by batch --------------------------------------------------------------------

    def _tokenize_prompts(self, prompts):
        return self._tokenize(prompts, lambda number: f"the prompt {excerpt(prompts[number])}")

    def _tokenize(self, prompts, named):
        """Token ids of prompts, which the policy can read; `named` has words for each by its number."""
        require_template(self.processing_class, prompts, named)
        try:
            tokenized = super()._tokenize_prompts(prompts)
        except TemplateError as error:
            raise ValueError(
                f"{named(0)}, or one of those that follow, cannot be rendered by the tokenizer's chat template: "
                f"{error}."
            ) from error
        if self._limits is not None:
            self._limits.require(tokenized[0], named)
        return tokenized

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        # Functions have been checked where they returned; this is what models give, and what weights make of it.
        for function, name, column in zip(self.reward_funcs, self.reward_func_names, rewards.T, strict=True):
            if isinstance(function, nn.Module):
                require_finite(f"the reward model {name!r}", column)
        weighted = rewards.nan_to_num(0.0) * self.reward_weights.to(rewards.device)
        require_finite(f"reward_weights={self.reward_weights.tolist()}: the weighted sum", weighted.sum(1))
        return rewards


def _row_of(name: str, numbers: list[int], number: int) -> str:
    return f"{name}: the prompt of row {numbers[number]}"
