"""What a run shows from its first line to its last: banner, bars, units, seconds, tables."""

import json
import logging
import subprocess
import sys
from contextlib import ExitStack
from functools import partial

from rich.cells import cell_len
from tqdm.auto import tqdm
from transformers.utils import logging as transformers_logging

from dc_trl import DCGRPOTrainer, HistoryCallback
from dc_trl.callbacks import benchmarks
from dc_trl.callbacks.summary import BeforeAndAfter, summarize
from dc_trl.hub.card import write_run_card
from dc_trl.records.runs import read_run
from dc_trl.records.tables import weighted_sum
from dc_trl.report.tables import facts_table, outcome_table
from dc_trl.resuming.manifest import write_manifest
from dc_trl.training.arguments import RunArguments
from dc_trl.training.banner import banner
from dc_trl.training.build import build_trainer

from .helpers import ROOT, make_config, make_model, make_prompts


TABLE = """
from dc_trl.records.tables import print_table
print_table(["", "before [x]"], [["w" * 130, "1"], ["δ̄ 漢字 " * 20, "[bold]2"]], "t" * 200)
"""


def test_a_table_in_a_file_is_as_wide_as_its_cells():
    printed = subprocess.run(
        [sys.executable, "-c", TABLE], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    title, *lines = printed.splitlines()
    assert title == "t" * 200
    assert "…" not in printed
    assert len(lines) == 6  # borders, head, and one line for each row
    for cell in ("w" * 130, "δ̄ 漢字 " * 20, "before [x]", "[bold]2"):
        assert sum(cell.strip() in line for line in lines) == 1
    assert len({cell_len(line) for line in lines}) == 1
    assert cell_len(lines[0]) < 160


def test_a_weighted_sum_in_words():
    assert weighted_sum({"a": 1.0, "b": 0.5, "c": 0.0, "d": -1.0, "e": -0.25}) == "a + 0.5·b − d − 0.25·e"
    assert weighted_sum({"a": -2.0}) == "− 2·a"


# --- the banner -----------------------------------------------------------------------------------------------------

QUICK = ["--config", "configs/quickstart.yaml", "--max_steps", "3"]
SERVER = ["--use_vllm", "true", "--vllm_mode", "server"]


def shown(trainer, output_dir, *words):
    arguments = RunArguments.parse([*QUICK, "--output_dir", str(output_dir), *words])
    trainer.args = arguments.trainer
    text = banner(trainer, arguments)
    assert len(text.splitlines()) <= 10
    return {line.split()[0]: line for line in text.splitlines()[1:]}


def test_the_banner_says_what_the_settings_mean(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["--eval_size", "8", "--use_peft", "true", "--lora_r", "4", "--rewards", "arithmetic", "math"]
    arguments = RunArguments.parse([*QUICK, "--output_dir", str(tmp_path), *words, "--reward_weights", "1", "0.5"])
    with ExitStack() as stack:
        trainer, _ = build_trainer(arguments, stack)
        text = banner(trainer, arguments)
    assert text.splitlines() == [
        "DC-GRPO",
        "  model       dc_trl/assets/tiny_qwen3, LoRA of rank 4",
        "  sampling    fp8 replica of the policy, in this process",
        "  constraint  lagrangian, ε = 0.0012, λ from 0.1",
        "  rewards     arithmetic_reward + 0.5·math_reward",
        "  training    3 step(s) on 48 problems of arithmetic",
        "  held out    8 problems, measured before and after training",
        f"  output      {tmp_path}",
    ]
    lines = shown(trainer, tmp_path, "--constraint", "none", "--rollout_correction", "token_mask")
    assert "none" in lines["constraint"]
    assert "ε" not in lines["constraint"]
    assert "token_mask" in lines["correction"]
    lines = shown(trainer, tmp_path, "--discrepancy_tolerance", "auto")
    assert "ε = auto" in lines["constraint"]
    assert "correction" not in lines
    assert shown(trainer, tmp_path, "--constraint", "static")["constraint"].endswith("static, λ = 0.1")
    lines = shown(trainer, tmp_path, "--vllm_server_base_url", "http://me:hunter2@host:80/?api_key=s3cret", *SERVER)
    assert "vLLM server, fp8: http://host:80/" in lines["sampling"]
    assert "hunter2" not in str(lines)
    assert "s3cret" not in str(lines)
    urls = ["--vllm_server_base_urls", "http://a:1", "http://b:2", *SERVER]
    assert "2 vLLM servers, fp8: http://a:1, http://b:2" in shown(trainer, tmp_path, *urls)["sampling"]
    assert "vLLM server of this run, fp8" in shown(trainer, tmp_path, "--serve", "auto", *SERVER)["sampling"]
    colocated = shown(trainer, tmp_path, "--use_vllm", "true", "--vllm_mode", "colocate")
    assert "vLLM in this process (colocate), fp8" in colocated["sampling"]
    trainer.eval_dataset = None
    assert shown(trainer, tmp_path, "--eval_size", "0")["held"].endswith("nothing (eval_size=0)")


# --- measured before and after --------------------------------------------------------------------------------------


def zero_or_one(completions, **kwargs):
    return [float(len(completion) % 2) for completion in completions]


def below_zero(completions, **kwargs):
    return [None if len(completion) % 3 == 0 else -len(completion) / 8 for completion in completions]


def nothing(completions, **kwargs):
    return [None] * len(completions)


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
    run = BeforeAndAfter(trainer)
    trainer.add_callback(run)
    trainer.train(resume_from_checkpoint=resume)
    summarize(trainer, run)
    return trainer, json.loads((folder / "summary.json").read_text())


def test_the_greedy_reward_is_the_weighted_sum_in_table_report_and_card(tmp_path, tokenizer, capsys):
    rewards = [zero_or_one, below_zero]
    trainer, summary = trained(tmp_path, tokenizer, rewards, reward_weights=[1.0, 0.5], bars=False, steps=1)
    printed = next(line for line in capsys.readouterr().out.splitlines() if "greedy reward" in line)
    greedy, words = summary["after"]["greedy"], "zero_or_one + 0.5·below_zero"
    assert f"greedy reward ({words}), " in printed
    assert f"{greedy:.3f} ±" in printed
    run = read_run(tmp_path)
    assert ["reward functions", words] in facts_table(run).rows
    measured = {row[0]: row[1:] for row in outcome_table(run).rows}
    assert measured["greedy reward"][1].startswith(f"{greedy:.3f} ±")
    write_run_card(trainer, None, None, [])
    assert f"{greedy:.3f} ±" in (tmp_path / "README.md").read_text()


def test_no_function_scores_what_is_held_out(tmp_path, tokenizer, capsys):
    _, summary = trained(tmp_path, tokenizer, [nothing], bars=False, steps=1)
    assert "greedy" not in summary["before"]
    assert "greedy reward" not in capsys.readouterr().out


def test_bars_say_what_is_evaluated_and_seconds_add_up(tmp_path, tokenizer, capsys, monkeypatch):
    monkeypatch.setattr(benchmarks, "tqdm", partial(tqdm, mininterval=0))  # a quick bar draws nothing between its ends
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    transformers_logging.get_logger("transformers.generation.utils").warning_once.__func__.cache_clear()
    transformers_logging.add_handler(handler)
    try:
        trained(tmp_path, tokenizer, [zero_or_one])
        shown = capsys.readouterr().err
        assert "held-out problems, greedy:   0%" in shown
        state = tmp_path / "checkpoint-1" / "dc_grpo_state.json"
        saved = json.loads(state.read_text())
        state.write_text(json.dumps(saved | {"seconds": saved["seconds"] | {"loss": 1000.0}}))
        write_manifest(state.parent, hashes=True)
        checkpoint = str(tmp_path / "checkpoint-1")
        trainer, summary = trained(tmp_path, tokenizer, [zero_or_one], resume=checkpoint, bars=False)
    finally:
        transformers_logging.remove_handler(handler)
    assert 1000 < summary["seconds"] == trainer.training_seconds < 1100
    assert "held-out" not in capsys.readouterr().err
    assert not [text for text in records if "prefill_chunk_size" in text]  # generation gets one configuration
