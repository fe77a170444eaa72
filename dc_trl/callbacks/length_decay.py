"""The length-decay learning rate, the detector that finds the surge of the response length, and both in a trainer.

They follow arXiv 2602.01826 ("the LR paper"): some time after the responses become abruptly longer, gradient noise
rises, and with it the mismatch of training and inference. From then on the learning rate is halved at intervals.
"""

import math
import statistics
from collections import deque
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, TrainerCallback

from ..settings.fields import COUNT, SHARE, require_number


# Decay period in units of the surge's step (LR paper: 204 steps for a surge at step 110, and 160 for one at 90).
PERIOD_PER_SURGE_STEP = 1.8


class SurgeDetector:
    """Finds online the step at which the responses become abruptly longer; the rule is ours.

    The surge is the first step at which the running median over 9 steps, centred on it, reaches 2 × the median of the
    up to 80 steps before those 9. It is known 4 steps later. docs/corrections.md shows the rule and its limits.

    Attributes:
        step: number of updates so far, which is the 1-based step of the last one.
        surge_step: 1-based step of the surge; None while there was none.
    """

    WINDOW = 9
    BASELINE = 80
    MIN_BASELINE = 10
    RATIO = 2.0

    def __init__(self) -> None:
        self.step = 0
        self.surge_step: int | None = None
        # (step, length) of the last steps that had a length.
        self._recent: deque[tuple[int, float]] = deque(maxlen=self.BASELINE + self.WINDOW)

    def update(self, mean_length: float) -> int | None:
        """Take the next step's mean response length, in tokens; return the 1-based step of the surge once found.

        The first surge stays the answer. A step whose length is NaN, infinite or 0 (nothing was sampled) counts as a
        step and as no measurement.
        """
        self.step += 1
        if self.surge_step is not None or not math.isfinite(mean_length) or mean_length == 0:
            return self.surge_step
        self._recent.append((self.step, float(mean_length)))
        if len(self._recent) >= self.MIN_BASELINE + self.WINDOW:
            steps, lengths = zip(*self._recent, strict=True)
            before, window = lengths[: -self.WINDOW], lengths[-self.WINDOW :]
            if statistics.median(window) >= self.RATIO * statistics.median(before):
                self.surge_step = steps[-self.WINDOW :][self.WINDOW // 2]
                self._recent.clear()
        return self.surge_step

    def state_dict(self) -> dict[str, Any]:
        """Return steps, recent lengths and the surge, as JSON-compatible values."""
        return {"step": self.step, "surge_step": self.surge_step, "recent": [list(entry) for entry in self._recent]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict()``."""
        self.step, self.surge_step = state_dict["step"], state_dict["surge_step"]
        self._recent.clear()
        self._recent.extend(map(tuple, state_dict["recent"]))


class LengthDecaySchedule(LRScheduler):
    """Learning rate that is halved every ``decay_period`` optimizer steps, down to a floor (LR paper, Algorithm 1).

    Optimizer step t = 1, 2, … is made at  η_t = η_0 · max(floor, 2^−⌊t / decay_period⌋),  with each parameter group's
    own η_0. At the default floor that is 1, 0.5, 0.25, 0.125, 0.1 times η_0. The algorithm's loop, as we read it,
    halves when t is a multiple of the period, and then updates: so step number ``decay_period`` is the first at half
    the rate. While ``decay_period`` is None, η_t = η_0.

    *Reactive form*: leave ``decay_period`` at None and pass the mean response length of every step to
    :meth:`observe`. Once the lengths have surged at step s, the period becomes 1.8 · s, rounded.

    ``decay_period`` may be set once, at any time. Halvings fall on the multiples of the period, counted from the first
    optimizer step; multiples up to the step that comes next are left out.

    Call :meth:`step` once per optimizer step. In a loop of your own, do not give the schedule to
    ``Accelerator.prepare``: its wrapper steps once per *process*.

    Args:
        optimizer: its groups' learning rates are η_0.
        decay_period: optimizer steps between two halvings, at least 1, or None: to be set later.
        floor: lowest rate as a fraction of η_0, in (0, 1]; 0.1 in the paper.

    Raises:
        ValueError: a value is out of its range; the message names it.
    """

    def __init__(self, optimizer: Optimizer, decay_period: int | None = None, floor: float = 0.1):
        require_number("floor", floor, SHARE)
        if decay_period is not None:
            require_number("decay_period", decay_period, COUNT)
        self.floor = float(floor)
        self.detector = SurgeDetector()
        self._decay_period = decay_period
        self._passed = 0  # multiples of the period that the next step had reached when it was set
        super().__init__(optimizer)

    @property
    def decay_period(self) -> int | None:
        """Optimizer steps between two halvings; None: not known yet."""
        return self._decay_period

    @decay_period.setter
    def decay_period(self, period: int) -> None:
        require_number("decay_period", period, COUNT)
        self._decay_period = period
        self._passed = (self.last_epoch + 1) // period

    @property
    def factor(self) -> float:
        """Present learning rate as a fraction of η_0, in [floor, 1]."""
        if self._decay_period is None:
            return 1.0
        return max(self.floor, 0.5 ** ((self.last_epoch + 1) // self._decay_period - self._passed))

    def observe(self, mean_length: float) -> int | None:
        """Take the mean response length of the next step; return the 1-based step of the surge once found.

        When the surge is found and no period is set, ``decay_period`` becomes 1.8 × its step, rounded.
        """
        surge = self.detector.update(mean_length)
        if surge is not None and self._decay_period is None:
            self.decay_period = round(PERIOD_PER_SURGE_STEP * surge)
        return surge

    def get_lr(self) -> list[Any]:
        """Return the parameter groups' learning rates for the next optimizer step, number ``last_epoch`` + 1."""
        return [rate * self.factor for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return what PyTorch's schedulers keep, the period, and the detector's state."""
        return super().state_dict() | {"detector": self.detector.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict()``: floor, η_0 and detector become the saved ones; so does a period not given.

        The state of another scheduler gives only the number of steps: this schedule begins there, at its own η_0.
        """
        if "detector" not in state_dict:
            self.last_epoch = self.detector.step = state_dict["last_epoch"]
            if self._decay_period is not None:
                self.decay_period = self._decay_period
        else:
            given = self._decay_period
            super().load_state_dict({name: value for name, value in state_dict.items() if name != "detector"})
            self.detector.load_state_dict(state_dict["detector"])
            if given is not None and given != self._decay_period:
                factor, self.decay_period = self.factor, given
                self._passed += math.floor(math.log2(factor))  # the halvings that were made stay
        # PyTorch leaves the rate to the optimizer's own state, which not everyone saves.
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate


class LengthDecayCallback(TrainerCallback):
    """Trains at the length-decay rate of arXiv 2602.01826: `trainer.add_callback(LengthDecayCallback(trainer))`.

    The trainer, ours or any of TRL's that logs `completions/mean_length`, gets a [`LengthDecaySchedule`] in place of
    the scheduler that `lr_scheduler_type` names.

    Without `decay_period`, the schedule observes the response lengths that the trainer logs, and the period becomes
    1.8 × the step of their surge. Use `logging_steps=1`: with 5 or more, one extreme batch can look like a surge.
    The period is logged once, as `length_decay/period`, and the surge that it comes from as `length_decay/surge_step`.

    Args:
        trainer (`Trainer`): a trainer that has not trained yet, and has no scheduler of yours.
        decay_period (`int`, *optional*): optimizer steps between two halvings, at least 1; by default found as above.
        floor (`float`, defaults to 0.1): lowest learning rate as a fraction of `learning_rate`, in (0, 1].

    Raises:
        ValueError: a setting of the trainer contradicts the schedule; the message names it.
    """

    def __init__(self, trainer: Trainer, decay_period: int | None = None, floor: float = 0.1):
        args = trainer.args
        if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2):
            raise ValueError(
                "DeepSpeed and FSDP1 need an optimizer made after they have wrapped the model, which "
                "LengthDecayCallback cannot schedule: use FSDP2 or DDP."
            )
        if args.warmup_steps > 0:
            raise ValueError(
                f"warmup_steps={args.warmup_steps!r} has no effect with LengthDecayCallback, which starts at the full "
                "learning rate: set warmup_steps=0."
            )
        if decay_period is None and args.logging_strategy != "steps":
            raise ValueError(
                f"logging_strategy={args.logging_strategy.value!r} hides the response lengths that decide the decay "
                "period: set logging_strategy='steps' and logging_steps=1, or decay_period."
            )
        self.schedule = LengthDecaySchedule(trainer.create_optimizer(), decay_period, floor)
        trainer.lr_scheduler = self.schedule
        self._trainer = trainer
        self._announced = False

    def on_train_begin(self, args, state, control, **kwargs):
        if (state.global_step == 0) != (self.schedule.last_epoch == 0):
            raise ValueError(
                f"The trainer starts at step {state.global_step} and its learning rate schedule at step "
                f"{self.schedule.last_epoch}: resume from a checkpoint that has a scheduler.pt "
                "(save_only_model=False), and make a new trainer for a new run."
            )
        # A resumed run has logged it already, unless it was found right before the checkpoint.
        self._announced = any("length_decay/period" in row for row in state.log_history)

    def on_log(self, args, state, control, logs=None, **kwargs):
        length = (logs or {}).get("completions/mean_length")
        if length is not None:
            for _ in range(state.global_step - self.schedule.detector.step):
                self.schedule.observe(length)

    def on_step_begin(self, args, state, control, **kwargs):
        # The trainer has logged its last step by now, so that this row takes nothing away from that one.
        schedule = self.schedule
        if self._announced or schedule.decay_period is None:
            return
        self._announced = True
        found = {"surge_step": schedule.detector.surge_step, "period": schedule.decay_period}
        self._trainer.log({f"length_decay/{name}": value for name, value in found.items() if value is not None})
