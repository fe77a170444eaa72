"""Trains to the end of a run, and saves, summarizes and pushes it; an early end has an exit code."""

import shlex
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from datasets import Dataset

from ..callbacks.before_and_after import BeforeAndAfter
from ..callbacks.collapse import CollapseAlarmCallback
from ..data.sources import DAPO
from ..files import write_json
from ..grading.checked_reward import RewardError
from ..processes import on_main_process
from ..records.runs import (
    DEPLOYMENT_FOLDER,
    FIGURE_FILE,
    HISTORY_FILE,
    MEASURED,
    SETTINGS_FILE,
    SUMMARY_FILE,
    outcome,
    read_summary,
    run_ended,
)
from ..records.tables import print_table
from ..records.verdict import verdict_of
from ..run.hub import CARD_FILE, HubError, run_files
from ..run.interruption import RunInterrupted, StopSignals
from ..run.manifest import checkpoints
from ..run.soundness import DivergedError
from ..serving.errors import ServerError
from ..settings.paths import serve_line
from ..trainer import DCGRPOTrainer
from .build import holds_weights
from .problems import DataArguments


# Argument of `sys.exit`: None for success, the message of an error, or the exit code of a signal.
Outcome: TypeAlias = str | int | None


def run(
    trainer: DCGRPOTrainer,
    alarm: CollapseAlarmCallback | None,
    data: DataArguments,
    signals: StopSignals,
    stack: ExitStack,
) -> Outcome:
    """Train, and write the files of the run; return why it ended early or was not pushed, or None.

    Args:
        trainer, alarm, stack: results of `build_trainer`; the stack is closed here if the run ends early.
        data: data settings, with the data set's name for the model card and the measurements during training.
        signals: callback that ends the run in order.
    """
    trainer.add_callback(BeforeAndAfter(trainer, data.eval_greedy))
    trainer.add_callback(signals)
    try:
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    except (ServerError, RunInterrupted, DivergedError) as error:
        return _end_early(trainer, error, stack)
    except RewardError as error:  # of this process, for which the others do not wait
        return "\n".join([f"error: {error}", *vars(error).get("__notes__", ())])
    folder, step = Path(trainer.args.output_dir), trainer.state.global_step

    def what_is_done() -> tuple[bool, bool]:
        """Return whether the run was saved at its end before it was resumed, and whether it was published too."""
        saved = trainer.run.resumed_at_end and run_ended(folder, step) and holds_weights(folder)
        return saved, saved and read_summary(folder).get("published") == _place(trainer)

    is_saved, is_published = on_main_process(what_is_done)
    if is_published:
        trainer.accelerator.print(f"The run in {trainer.args.output_dir} is finished and unchanged.", flush=True)
        release_processes(trainer)
        return None
    if alarm is not None and alarm.stopped is not None:
        # The last trained weights must not be taken for the run's result.
        release_processes(trainer)
        if not trainer.accelerator.is_main_process:
            return 1  # the main process alone knows the last good checkpoint
        way_back = f"resume_from_checkpoint={alarm.last_good!r}" if alarm.last_good else "no checkpoint is good"
        return f"error: the collapse alarm stopped the run ({alarm.stopped.signal}): {way_back}."
    if not is_saved:
        if trainer.is_fsdp_enabled:  # accelerate's default of FSDP2 saves shards, which are no model
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        # A user's call of save_model would push before there is a summary.
        trainer.save_model(trainer.args.output_dir, _internal_call=True)
        if trainer.accelerator.is_main_process:
            summarize(trainer)
    failure = _publish(trainer, DAPO.hub_id if data.dataset_name == "dapo" else data.dataset_name)
    if failure is None:
        if trainer.accelerator.is_main_process:
            write_json(folder / SUMMARY_FILE, read_summary(folder) | {"published": _place(trainer)})
        release_processes(trainer)
    return failure


def _place(trainer: DCGRPOTrainer) -> str:
    """Return where the model card of a run goes, with the run itself if it is pushed: its last step."""
    args = trainer.args
    return "@".join(filter(None, [trainer.hub_model_id, args.hub_revision])) if args.push_to_hub else CARD_FILE


def _end_early(trainer: DCGRPOTrainer, error: Exception, stack: ExitStack) -> Outcome:
    """End the run's own server and its processes together."""
    if isinstance(error, RunInterrupted):  # printed at once, since the sender of the signal may soon kill the process
        trainer.accelerator.print(f"\n{error}", file=sys.stderr, flush=True)
        began = trainer.state.global_step > 0 or checkpoints(trainer.args.output_dir)
        if not began and trainer.accelerator.is_main_process:  # the same command is to start again
            for name in (HISTORY_FILE, SETTINGS_FILE):
                Path(trainer.args.output_dir, name).unlink(missing_ok=True)
    stack.close()
    # If one process of several fails, the launcher ends the others, and the server may still run.
    trainer.accelerator.wait_for_everyone()
    release_processes(trainer)
    return error.exit_code if isinstance(error, RunInterrupted) else f"error: {error}"


def summarize(trainer: DCGRPOTrainer) -> None:
    """Print what the run changed, and save a summary beside the model."""
    args, state = trainer.args, trainer.state
    engine = ", ".join(filter(None, ["vLLM" if args.use_vllm else None, args.deployment_scheme])) or "model.generate"
    deployed = trainer.checkpoints.policy_step
    logged = trainer.checkpoints.policy_run
    tokens, seconds = state.num_input_tokens_seen, sum(trainer.clock.seconds().values())
    rows = [["tokens sampled and read", "", f"{tokens:,}"], ["training seconds", "", f"{seconds:.0f}"]]
    verdict = verdict_of(logged)
    title = f"Deployed policy ({engine}) after step {deployed}, constraint {args.constraint}"
    if isinstance(trainer.eval_dataset, Dataset):  # a stream has no size
        title += f", held-out problems: {len(trainer.eval_dataset)}"
    print_table(("", "before", "after"), [*outcome(logged), *rows], title)
    measured = {name: logged.series(metric).by_step() for name, metric in MEASURED.items()}
    summary = {
        "engine": engine,
        "constraint": args.constraint,
        "steps": state.global_step,
        "before": {name: values[0] for name, values in measured.items() if 0 in values},
        "after": {name: values[deployed] for name, values in measured.items() if deployed in values},
        "lambda": trainer.lagrange_multiplier.value,
        "tokens": tokens,
        "seconds": seconds,
    }
    write_json(Path(args.output_dir, SUMMARY_FILE), summary)
    print(f"Model, {HISTORY_FILE} and {FIGURE_FILE} are in {args.output_dir}")
    if args.exports_deployment:
        deployment = Path(args.output_dir, DEPLOYMENT_FOLDER)
        print(f"Serve it: {serve_line(deployment)}" if verdict.worth_serving else f"The policy is in {deployment}")


def _publish(trainer: DCGRPOTrainer, dataset_name: str | None) -> Outcome:
    """Push the run, or only write its model card; report a failed push with the command that repeats it."""
    args = trainer.args
    if not args.push_to_hub:
        trainer.create_model_card(dataset_name=dataset_name)
        return None
    try:
        trainer.push_to_hub(dataset_name=dataset_name, export=not args.exports_deployment)
    except HubError as error:
        words = ["hf", "upload", args.hub_model_id or "OWNER/MODEL", args.output_dir, "."]
        words += [word for name in run_files(args.output_dir) for word in ("--include", name)]
        command = shlex.join(words if args.hub_revision is None else [*words, "--revision", args.hub_revision])
        return f"error: {error}\nThe run is complete in {args.output_dir}. Push it later: {command}"
    return None


def release_processes(trainer: DCGRPOTrainer) -> None:
    """Release the engine and the process group, since processes that still hold it may abort at exit."""
    # Gloo deadlocks if it is shut down while its thread releases the last gather, for which the thread takes the
    # interpreter's lock (torch 2.13). The pause gives it time.
    if trainer.accelerator.num_processes > 1:
        time.sleep(1)
    if trainer.use_vllm:
        trainer.vllm_generation.close()
    trainer.accelerator.end_training()
