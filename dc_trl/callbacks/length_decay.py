"""The length-decay learning rate (arXiv 2602.01826) in a trainer."""

from transformers import Trainer, TrainerCallback
from transformers.utils import logging

from .lr_schedule import LengthDecaySchedule


logger = logging.get_logger(__name__)


class LengthDecayCallback(TrainerCallback):
    """Trains at the length-decay rate of arXiv 2602.01826: `trainer.add_callback(LengthDecayCallback(trainer))`.

    The trainer, ours or any of TRL's that logs `completions/mean_length`, gets a [`LengthDecaySchedule`] in place of
    the scheduler that `lr_scheduler_type` names. It is stepped, logged, saved (`scheduler.pt`, with the detector's
    state) and resumed as the trainer's own.

    Without `decay_period`, the schedule observes the response lengths that the trainer logs, and the period becomes
    1.8 × the step of their surge. Use `logging_steps=1`. A log of several steps holds their mean, which stands for
    each of them: the surge is then known to within `logging_steps`, and from 5 on one extreme batch can look like it.

    Surge, period and number of halvings are logged when they become known or change, as `length_decay/surge_step`,
    `length_decay/period` and `length_decay/halvings`, at the last step before they hold, in a row of their own.

    Args:
        trainer (`Trainer`): a trainer that has not trained yet. If it was given a `LengthDecaySchedule` in
            `optimizers`, that one is used, with its settings.
        decay_period (`int`, *optional*): optimizer steps between two halvings, at least 1; by default found as above.
        floor (`float`, defaults to 0.1): lowest learning rate as a fraction of `learning_rate`, in (0, 1].

    Raises:
        ValueError: a setting of the trainer contradicts the schedule; the message names it.
    """

    def __init__(self, trainer: Trainer, decay_period: int | None = None, floor: float = 0.1):
        args = trainer.args
        if trainer.is_deepspeed_enabled:
            raise ValueError(
                "DeepSpeed makes its own optimizer, which LengthDecayCallback cannot schedule: use FSDP2 or DDP."
            )
        if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1:
            raise ValueError(
                "fsdp_version=1 replaces the parameters that the optimizer is made for: set fsdp_version=2 to use "
                "LengthDecayCallback."
            )
        if args.warmup_steps > 0:
            raise ValueError(
                f"warmup_steps={args.warmup_steps!r} has no effect with LengthDecayCallback, which starts at the full "
                "learning rate: set warmup_steps=0."
            )
        given = trainer.lr_scheduler
        if given is None:
            given = LengthDecaySchedule(trainer.create_optimizer(), decay_period, floor)
            if args.lr_scheduler_type != "constant":
                logger.warning(
                    f"LengthDecayCallback takes the place of lr_scheduler_type={args.lr_scheduler_type.value!r}."
                )
            trainer.lr_scheduler = given
        elif not isinstance(given, LengthDecaySchedule):
            raise ValueError(
                f"The trainer already has the scheduler {type(given).__name__}: make the callback before train(), and "
                "pass optimizers=(…, None)."
            )
        elif (decay_period, floor) not in ((None, 0.1), (given.decay_period, given.floor)):
            raise ValueError(
                f"decay_period={decay_period!r}, floor={floor!r} contradict the trainer's LengthDecaySchedule "
                f"(decay_period={given.decay_period!r}, floor={given.floor!r}): set them there only."
            )
        if given.decay_period is None and args.logging_strategy != "steps":
            raise ValueError(
                f"logging_strategy={args.logging_strategy.value!r} hides the response lengths that decide the decay "
                "period: set logging_strategy='steps' and logging_steps=1, or decay_period."
            )
        self.schedule: LengthDecaySchedule = given
        self._trainer = trainer
        self._announced: dict[str, int] = {}

    def on_train_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        if lr_scheduler is not self.schedule:
            raise ValueError(
                f"The trainer trains with {type(lr_scheduler).__name__} and not with the schedule of its "
                "LengthDecayCallback: leave trainer.lr_scheduler as the callback set it."
            )
        if (state.global_step == 0) != (self.schedule.last_epoch == 0):
            raise ValueError(
                f"The trainer starts at step {state.global_step} and its learning rate schedule at step "
                f"{self.schedule.last_epoch}: resume from a checkpoint that has a scheduler.pt "
                "(save_only_model=False), and make a new trainer for a new run."
            )
        # A resumed run has logged these already, except for what it found right before the checkpoint.
        self._announced = {
            name: row[name] for row in state.log_history for name in row if name.startswith("length_decay/")
        }

    def on_log(self, args, state, control, logs=None, **kwargs):
        length = (logs or {}).get("completions/mean_length")
        if length is not None:
            for _ in range(state.global_step - self.schedule.detector.step):
                self.schedule.observe(length)

    def on_train_end(self, args, state, control, **kwargs):
        if self.schedule.decay_period is None and self.schedule.detector.step == 0:
            logger.warning(
                "No completions/mean_length was logged, so the learning rate stayed constant: set decay_period, or "
                "use a trainer that samples."
            )

    def on_step_begin(self, args, state, control, **kwargs):
        schedule = self.schedule
        now = {
            "length_decay/surge_step": schedule.surge_step,
            "length_decay/period": schedule.decay_period,
            "length_decay/halvings": schedule.halvings or None,
        }
        news = {name: n for name, n in now.items() if n is not None and n != self._announced.get(name)}
        if not news:
            return
        self._announced |= news
        if state.is_world_process_zero:
            found = ", ".join(f"{name.removeprefix('length_decay/')} {n}" for name, n in news.items())
            logger.info(f"Length decay after step {state.global_step}: {found}; rate {schedule.factor:g} × initial.")
        self._trainer.log(dict(news))

    # Both are called after the trainer has logged a step, so that a row of ours takes nothing away from the trainer's.
    on_epoch_end = on_step_begin
