"""What a run shows from its first line to its last: bars, units, seconds, tables."""

import json
import logging

from transformers.utils import logging as transformers_logging

from dc_trl import DCGRPOTrainer, HistoryCallback
from dc_trl.callbacks.before_and_after import BeforeAndAfter
from dc_trl.records.runs import read_run
from dc_trl.report.tables import outcome_table
from dc_trl.resuming.checkpoints import write_manifest
from dc_trl.training.summary import summarize

from .helpers import make_config, make_model, make_prompts


# --- measured before and after --------------------------------------------------------------------------------------


def zero_or_one(completions, **kwargs):
    return [float(len(completion) % 2) for completion in completions]


def below_zero(completions, **kwargs):
    return [None if len(completion) % 3 == 0 else -len(completion) / 8 for completion in completions]


def trained(folder, tokenizer, rewards, resume=None, steps=2, bars=True, **fields):
    config = make_config(
        folder,
        deployment_scheme="fp8",
        max_steps=steps,
        save_strategy="steps",
        save_steps=1,
        disable_tqdm=not bars,
        **fields,
    )
    config.resume_from_checkpoint = resume
    trainer = DCGRPOTrainer(
        make_model(),
        rewards,
        config,
        train_dataset=make_prompts(2),
        eval_dataset=make_prompts(8),
        processing_class=tokenizer,
        callbacks=[HistoryCallback()],
    )
    trainer.add_callback(BeforeAndAfter(trainer))
    trainer.train(resume_from_checkpoint=resume)
    summarize(trainer)
    return trainer, json.loads((folder / "summary.json").read_text())


def test_the_greedy_reward_is_the_weighted_sum_in_table_report_and_card(tmp_path, tokenizer, capsys):
    rewards = [zero_or_one, below_zero]
    trainer, summary = trained(tmp_path, tokenizer, rewards, reward_weights=[1.0, 0.5], bars=False, steps=1)
    printed = next(line for line in capsys.readouterr().out.splitlines() if "greedy reward" in line)
    greedy = summary["after"]["greedy"]
    assert f"{greedy:.3f} ±" in printed
    run = read_run(tmp_path)
    measured = {row[0]: row[1:] for row in outcome_table(run).rows}
    assert measured["greedy reward"][1].startswith(f"{greedy:.3f} ±")
    trainer.create_model_card()
    assert f"{greedy:.3f} ±" in (tmp_path / "README.md").read_text()


def test_bars_say_what_is_evaluated_and_seconds_add_up(tmp_path, tokenizer, capsys):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    transformers_logging.get_logger("transformers.generation.utils").warning_once.__func__.cache_clear()
    transformers_logging.add_handler(handler)
    try:
        trained(tmp_path, tokenizer, [zero_or_one])
        shown = capsys.readouterr().err
        assert "held-out problems, greedy, 1 of 1" in shown
        state = tmp_path / "checkpoint-1" / "dc_grpo_state.json"
        saved = json.loads(state.read_text())
        state.write_text(json.dumps(saved | {"seconds": saved["seconds"] | {"loss": 1000.0}}))
        write_manifest(state.parent)
        checkpoint = str(tmp_path / "checkpoint-1")
        trainer, summary = trained(tmp_path, tokenizer, [zero_or_one], resume=checkpoint, bars=False)
    finally:
        transformers_logging.remove_handler(handler)
    assert 1000 < summary["seconds"] == trainer.training_seconds < 1100
    assert "held-out" not in capsys.readouterr().err
    assert not [text for text in records if "prefill_chunk_size" in text]  # generation gets one configuration
