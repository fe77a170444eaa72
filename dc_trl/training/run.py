"""A run from its first step to its end: trained, saved, summarized, pushed, or ended early with an exit code."""

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from ..callbacks.collapse import CollapseAlarmCallback
from ..callbacks.summary import BeforeAndAfter, summarize
from ..data.dapo import DAPO
from ..hub.push import HubError, push_command
from ..records.runs import BASELINE_FILE, HISTORY_FILE, SETTINGS_FILE
from ..records.started import STARTS_FILE
from ..resuming.checkpoints import checkpoints
from ..resuming.interruption import RunInterrupted, StopSignals
from ..serving.errors import ServerError
from ..trainer import DCGRPOTrainer
from .problems import DataArguments


# What `sys.exit` takes: None where all went well, the message of an error, or the exit code of a signal.
Outcome: TypeAlias = str | int | None


def run(
    trainer: DCGRPOTrainer,
    alarm: CollapseAlarmCallback | None,
    data: DataArguments,
    signals: StopSignals,
    stack: ExitStack,
) -> Outcome:
    """Trains, and writes what a run leaves.

    Args:
        trainer, alarm, stack: of `build_trainer`; the stack is closed here where the run ends early.
        data: of the configuration: the data set's name for the model card, and what is measured in between.
        signals: end the run in order.

    Returns:
        None, or why the run ended early or was not pushed.
    """
    measured = BeforeAndAfter(trainer, data.eval_greedy)
    trainer.add_callback(measured)
    trainer.add_callback(signals)
    try:
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    except (ServerError, RunInterrupted) as error:
        return _end_early(trainer, error, stack)
    if alarm is not None and alarm.stopped is not None:
        # What trained last is not to be taken for the run's result.
        way_back = f"resume_from_checkpoint={alarm.last_good!r}" if alarm.last_good else "no checkpoint is good"
        return f"error: the collapse alarm stopped the run ({alarm.stopped.signal}): {way_back}."
    # A user's call of save_model would push, and there is no summary yet.
    trainer.save_model(trainer.args.output_dir, _internal_call=True)
    if trainer.accelerator.is_main_process:
        summarize(trainer, measured)
    failure = _publish(trainer, DAPO.hub_id if data.dataset_name == "dapo" else data.dataset_name)
    if failure is None:
        release_processes(trainer)
    return failure


def _end_early(trainer: DCGRPOTrainer, error: ServerError | RunInterrupted, stack: ExitStack) -> Outcome:
    """Ends the run's own server and its processes together."""
    if isinstance(error, RunInterrupted):  # at once: whoever sent the signal may kill soon
        trainer.accelerator.print(f"\n{error}", file=sys.stderr, flush=True)
        if trainer.state.global_step == 0 and not checkpoints(trainer.args.output_dir):
            _leave_nothing(trainer)
    stack.close()
    # When one process of several fails, the launcher ends the others, and the server may still run.
    trainer.accelerator.wait_for_everyone()
    release_processes(trainer)
    return error.exit_code if isinstance(error, RunInterrupted) else f"error: {error}"


def _leave_nothing(trainer: DCGRPOTrainer) -> None:
    """Removes what a run has written before its first step, so that the same command begins again."""
    if trainer.accelerator.is_main_process:
        for name in (HISTORY_FILE, SETTINGS_FILE, STARTS_FILE, BASELINE_FILE):
            Path(trainer.args.output_dir, name).unlink(missing_ok=True)


def _publish(trainer: DCGRPOTrainer, dataset_name: str | None) -> Outcome:
    """Pushes the run, or writes its model card alone; a push that failed is told with the command to repeat it."""
    args = trainer.args
    if not args.push_to_hub:
        trainer.create_model_card(dataset_name=dataset_name)
        return None
    try:
        trainer.push_to_hub(dataset_name=dataset_name, export=not args.exports_deployment)
    except HubError as error:
        command = push_command(args, trainer.hub_model_id)
        return f"error: {error}\nThe run is whole in {args.output_dir}. Push it later: {command}"
    return None


def release_processes(trainer: DCGRPOTrainer) -> None:
    """Lets go of the engine and of the process group: processes that still hold it may abort at exit."""
    # Gloo deadlocks when it is taken down while its thread lets go of the last gather, which takes the interpreter's
    # lock (torch 2.13): leave it the time.
    if trainer.accelerator.num_processes > 1:
        time.sleep(1)
    if trainer.use_vllm:
        trainer.vllm_generation.close()
    trainer.accelerator.end_training()
