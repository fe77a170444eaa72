"""The length-decay learning rate (arXiv 2602.01826) in a trainer."""

from transformers import Trainer, TrainerCallback

from .lr_schedule import LengthDecaySchedule


class LengthDecayCallback(TrainerCallback):
    """Trains at the length-decay rate of arXiv 2602.01826: `trainer.add_callback(LengthDecayCallback(trainer))`.

    The trainer, ours or any of TRL's that logs `completions/mean_length`, gets a [`LengthDecaySchedule`] in place of
    the scheduler that `lr_scheduler_type` names. It is stepped, logged, saved (`scheduler.pt`, with the detector's
    state) and resumed as the trainer's own.

    Without `decay_period`, the schedule observes the response lengths that the trainer logs, and the period becomes
    1.8 × the step of their surge. Use `logging_steps=1`. A log of several steps holds their mean, which stands for
    each of them: the surge is then known to within `logging_steps`, and from 5 on one extreme batch can look like it.

    The period is logged once, as `length_decay/period` in a row of its own, and the surge that it comes from with it,
    as `length_decay/surge_step`.

    Args:
        trainer (`Trainer`): a trainer that has not trained yet, and has no scheduler of yours.
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
        found = {"surge_step": schedule.surge_step, "period": schedule.decay_period}
        self._trainer.log({f"length_decay/{name}": value for name, value in found.items() if value is not None})
