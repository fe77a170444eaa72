"""`RunTrainer`: the life of a run, from the lock on its output directory to its export and push."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from transformers import TrainerCallback

from ..config import DCGRPOConfig
from ..files import lock_output, read_object, set_aside, written_beside
from ..hub.card import CARD_FILE, complete_card, hub_dataset
from ..hub.push import HubClient, without_token
from ..quantization.policy import base_model, unwrapped
from ..quantization.tensors import policy_tensors, require_merged_form
from ..records.estimators import recent_mean
from ..records.runs import DEPLOYMENT_FOLDER, TRAINER_STATE_FILE, Run
from ..resuming.checkpoints import on_main_process, resumable_checkpoint, set_aside_later
from ..resuming.interruption import RunInterrupted, StopSignals
from ..serving.errors import ServerError
from ..settings.paths import serve_line
from .checkpoints import Checkpoints
from .history import HistoryCallback
from .sampling import SamplingTrainer


# Imported only where a policy is exported: compressed-tensors and its dependencies take 0.15 s.
if TYPE_CHECKING:
    from ..quantization.checkpoint import CheckpointWriter

logger = get_logger(__name__)


class RunTrainer(SamplingTrainer):
    """A trainer that locks its output directory, saves and resumes, exports and pushes; see [`DCGRPOTrainer`].

    Attributes:
        checkpoints (`Checkpoints`): saves the run and resumes it.
        exports_at_end (`bool`): whether the present training exports the policy when it ends; `train` sets it each
            time. A callback that stops a run whose result should not be served clears it.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: DCGRPOConfig,
        *,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        **kwargs: Any,
    ):
        # Set before TRL's constructor, which adds callbacks.
        self._own_history: HistoryCallback | None = None
        callbacks = list(callbacks or ())
        if args.export_run and not any(map(_keeps_history, callbacks)):
            self._own_history = HistoryCallback()
            callbacks.insert(0, self._own_history)  # a user's callback finds the files of the same event written
        super().__init__(model, reward_funcs, args, callbacks=callbacks, **kwargs)
        self.checkpoints = Checkpoints(self)
        self.exports_at_end = args.exports_deployment
        self._resumed_at: int | None = None  # step of the checkpoint from which the present training resumed

    def add_callback(self, callback):
        """Add a callback; a `HistoryCallback` replaces the trainer's own."""
        if self._own_history is not None and _keeps_history(callback):
            self.remove_callback(HistoryCallback)
            self._own_history = None
        super().add_callback(callback)

    # --- training and its end ---------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """Train as [`~transformers.Trainer.train`] does; a second call starts again with the present weights.

        λ starts at `lambda_init` again, or from its value in the checkpoint of `resume_from_checkpoint`. `True`
        selects the newest complete checkpoint in `output_dir`; `"auto"` does too, but the run starts from the
        beginning if there is none. A run whose steps are all done is not trained further: its weights are loaded, what
        is still missing at its end (an evaluation, the deployment) is made, and the result is returned.

        The directory is locked during training. If an error of a reward function, callback or server or Ctrl-C ends
        training early, the last step that ended is saved before the error is raised, with a note that says how to
        resume. Nothing is saved while the optimizer is changing the weights; of several processes, a signal or a lost
        server saves, and another error does not.

        Raises:
            ValueError: the checkpoint is incomplete, or `output_dir` is in use by another process or not writable.
            ServerError: the server cannot do what training needs; the message says how to resume.
            RunInterrupted: a signal ended the run, with a checkpoint if a step had ended; only if `StopSignals` is
                among the callbacks, as in `dc-trl train`.
        """
        self.parts_clock.start()
        if self.micro_batches_done > 0:  # this object has trained before
            self.start_again()
        self._resumed_at = None
        with ExitStack() as stack:
            stack.callback(self.parts_clock.stop)

            def open_output() -> str | None:
                stack.enter_context(lock_output(self.args.output_dir))
                found = resumable_checkpoint(resume_from_checkpoint, self.args.output_dir)
                set_aside_later(self.args.output_dir, found)
                return found

            checkpoint = on_main_process(open_output)
            if checkpoint is not None:
                self._resumed_at = read_object(Path(checkpoint, TRAINER_STATE_FILE))["global_step"]
            self.checkpoints.begin_training()
            try:
                return self._train_and_export(checkpoint, *args, **kwargs)
            except ServerError as error:  # in all processes together
                stops = [each for each in self.callback_handler.callbacks if isinstance(each, StopSignals)]
                signum = max((stop.common_signal() for stop in stops), default=0)
                way_back = self.checkpoints.save_after_failure(together=True)
                if signum:  # which has ended the request
                    raise RunInterrupted(signum, way_back) from error
                raise ServerError(f"{error} {way_back}") from error
            except RunInterrupted as stop:
                raise RunInterrupted(stop.signum, self.checkpoints.way_back()) from stop
            except BaseException as error:
                if self.state.global_step > 0:
                    error.add_note(self.checkpoints.save_after_failure(together=False))
                raise

    def _train_and_export(self, checkpoint: str | None, *args: Any, **kwargs: Any) -> Any:
        self.exports_at_end = self.args.exports_deployment
        if self.exports_at_end:
            on_main_process(self._require_exportable)
        output = super().train(checkpoint, *args, **kwargs)
        if self.args.load_best_model_at_end:
            self.sampler.start_again()  # vLLM still holds the last weights
        if self.exports_at_end:
            self._export(self.args.output_dir)
        return output

    @property
    def resumed_at_end(self) -> bool:
        """Whether the present training resumed a run whose steps were all done."""
        return self._resumed_at is not None and self._resumed_at >= self.state.max_steps

    def set_initial_training_values(self, args, dataloader):
        epochs, steps_per_epoch, *others, steps = super().set_initial_training_values(args, dataloader)
        resumed_at = self._resumed_at
        if resumed_at is None or resumed_at < steps:
            return (epochs, steps_per_epoch, *others, steps)
        logger.warning(
            f"All {steps} steps of this run are done (step {resumed_at} of resume_from_checkpoint): nothing is "
            "trained. For more steps raise max_steps or num_train_epochs."
        )
        return (0, steps_per_epoch, *others, steps)  # otherwise transformers would make one step of the last epoch

    def start_again(self) -> None:
        """Reset everything that an earlier training of this object left, except the weights."""
        self.micro_batches_done, self.generation_batch = 0, None
        self.metrics_since_log("train").clear()
        self.sampler.start_again()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def end_step(self):
        self.checkpoints.end_step()

    def write_checkpoint(self, trial=None):
        write = super().write_checkpoint
        self.checkpoints.write(lambda: write(trial), self.checkpoint_folder(trial))

    def load_state(self, checkpoint):
        self.checkpoints.load(checkpoint)

    def write_model(self, output_dir, state_dict):
        # The arguments are pickled with the model: without a token.
        with without_token(self.args), written_beside(Path(output_dir)) as beside:
            super().write_model(str(beside), state_dict)
            (beside / CARD_FILE).unlink(missing_ok=True)  # PEFT's, in place of which a run has its own

    # --- the checkpoint that is served ------------------------------------------------------------------------------

    def save_deployment(self, directory: str | os.PathLike[str]) -> None:
        """Write the policy as it is deployed, in `deployment_scheme` or bf16; see `CheckpointWriter.write`.

        With `lora_deployment="adapter"` the directory has the base, and the adapter in `adapter/`. A directory that
        holds no model is a user's own, and is renamed. If the file system refuses, the previous contents are unharmed.
        Every process must call it.
        """
        beside = unwrapped(self.accelerator, self.model) if self.args.lora_deployment == "adapter" else None
        tensors = self.deployed_tensors() if beside is None else policy_tensors(beside, adapters=False)
        if self.accelerator.is_main_process:
            folder = Path(directory).absolute()  # a link in its place is not followed
            folder.parent.mkdir(parents=True, exist_ok=True)
            if not (folder / "config.json").is_file():
                for kept in set_aside([folder]).values():
                    logger.warning(f"{folder} holds no deployed checkpoint and is kept as {kept.name}.")
            self._checkpoint_writer.write(tensors, folder, self._facts(), beside)
        for _ in tensors:
            pass  # takes part in gathering

    def _facts(self) -> dict[str, Any]:
        """Return what the contract of a deployed checkpoint says of the run; None for what was not measured."""
        model = base_model(unwrapped(self.accelerator, self.model))
        history = Run("", self.state.log_history)
        return {
            "base_model": self.args.hub_base_model_id or model.config.name_or_path or None,
            **dict(zip(("engine", "engine_version", "kv_cache_dtype"), self.sampler.identity, strict=True)),
            "step": self.state.global_step,
            "discrepancy": recent_mean(history.series("discrepancy/mean").values),
            "k3_kl": recent_mean(history.series("discrepancy/k3_kl").values),
        }

    @cached_property
    def _checkpoint_writer(self) -> CheckpointWriter:
        from ..quantization.checkpoint import CheckpointWriter

        policy = unwrapped(self.accelerator, self.model)
        return CheckpointWriter(policy, self.args.deployment_scheme or "bf16", self.processing_class)

    def _require_exportable(self) -> None:
        """Raise a ValueError before the first step if the policy cannot be exported after the last one."""
        try:
            require_merged_form(unwrapped(self.accelerator, self.model))
            _ = self._checkpoint_writer
        except ValueError as error:
            raise ValueError(f"{error} Or set export_run=False to train without an export.") from error

    def _export(self, directory: str | os.PathLike[str]) -> None:
        folder = Path(directory).resolve() / DEPLOYMENT_FOLDER
        with self.parts_clock.part("saving"):
            self.save_deployment(folder)
            logger.info(f"The policy is exported: {serve_line(folder)}")

    def save_model(self, output_dir=None, _internal_call=False):
        """Save the model as [`~transformers.Trainer.save_model`] does, and the deployable checkpoint beside it.

        The checkpoint is written to `deployment/` in the same directory if `export_run` and a served
        `deployment_scheme` are set. A folder of that name without a model is kept as `deployment.1/` and so on.
        transformers' own calls for each `checkpoint-N` export nothing, because each would cost the disk
        space of a whole model; `DeploymentCheckpointCallback` exports them on request.
        If the file system refuses, the previous contents are unharmed.
        """
        if self.args.exports_deployment and not _internal_call:
            self._export(self.args.output_dir if output_dir is None else output_dir)
        super().save_model(output_dir, _internal_call)

    # --- the Hub ----------------------------------------------------------------------------------------------------

    @cached_property
    def _hub(self) -> HubClient:
        return HubClient(self.args)

    def init_hf_repo(self, token=None):
        with self._hub.pushing():
            super().init_hf_repo(token)

    def push_to_hub(self, *args, export=True, **kwargs):
        """Push the run: model, deployment checkpoint, history of λ, figure and model card; see docs/after_training.md.

        It takes and returns what [`~transformers.Trainer.push_to_hub`] does; `dataset_name` and `tags` go to the card.
        Every process has to call it.

        The deployment checkpoint is first written from the present weights, unless `export` is False.

        Raises:
            HubError: the Hub refused or could not be reached. Calling this again sends what is missing.
        """
        if export and self.args.deployment_scheme is not None:
            self.save_deployment(Path(self.args.output_dir, DEPLOYMENT_FOLDER))
        with self._hub.pushing():
            return super().push_to_hub(*args, **kwargs)

    def push_checkpoint(self, folder):
        with self._hub.pushing(deployment=False):
            self.checkpoints.make_whole(folder)
            super().push_checkpoint(folder)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        """Write README.md into the output directory: TRL's card, with what the run says of its constraint."""
        if self.is_world_process_zero():
            card = Path(self.args.output_dir, CARD_FILE)
            card.unlink(missing_ok=True)  # a link is not followed
            super().create_model_card(model_name or card.absolute().parent.name, hub_dataset(dataset_name), tags)
            complete_card(self)


def _keeps_history(callback: Any) -> bool:
    return callback is HistoryCallback or isinstance(callback, HistoryCallback)  # transformers instantiates classes
