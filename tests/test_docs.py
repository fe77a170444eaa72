"""The documentation against the code: what it quotes, names and commands has to exist."""

import argparse
import ast
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import trl
import yaml
from accelerate.commands.launch import launch_command_parser
from trl import TrlParser

from dc_trl.callbacks.collapse_monitor import ADVICE

from .helpers import ROOT, Rollouts, load_script, make_config, make_model, make_prompts
from .vllm_server import requires_vllm


DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def page(name):
    return (DOCS / name).read_text()


def blocks(text, *languages):
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


# --- pages that are made


@pytest.fixture(scope="module")
def reference():
    return load_script("make_reference")


@pytest.mark.parametrize("name", ["api.md", "configuration.md"])
def test_a_made_page_is_up_to_date(reference, name):
    assert reference.PAGES[name]() == page(name), "run `make reference`"


def test_every_error_of_the_configuration_is_shown(reference):
    lines = reference.unexplained_checks()
    assert not lines, f"dc_trl/config.py, lines {lines}: add an example to CONTRADICTIONS in scripts/make_reference.py"


def test_every_setting_of_the_training_script_is_shown(reference):
    headings = set(re.findall(r"^### `(\w+)`$", page("configuration.md"), re.MULTILINE))
    rows = set(re.findall(r"^\| `(\w+)` \|", page("configuration.md"), re.MULTILINE))
    for config in reference.load_train_script().ARGUMENTS:
        fields = set(config.__dataclass_fields__)
        if config is reference.DCGRPOConfig:
            assert headings == fields - set(trl.GRPOConfig.__dataclass_fields__)
        elif config is not trl.ModelConfig:
            assert fields <= rows


# --- metrics


def documented_metrics():
    return re.findall(r"^\| (`[\w/]+`(?:, `[\w/]+`)*) \|", page("metrics.md"), re.MULTILINE)


def test_metrics_are_those_that_a_run_logs(tmp_path, tokenizer):
    from dc_trl import DCGRPOTrainer

    names = {name for cell in documented_metrics() for name in re.findall(r"[\w/]+", cell)}
    trainer = DCGRPOTrainer(
        make_model(),
        lambda completions, **kwargs: [len(set(text)) / 10 for text in completions],
        make_config(tmp_path, max_steps=1),
        train_dataset=make_prompts(),
        processing_class=tokenizer,
        rollout_func=Rollouts(),
    )
    trainer.train()
    logged = set().union(*trainer.state.log_history)
    for prefix in ("discrepancy/", "lagrangian/"):
        assert {name for name in names if name.startswith(prefix)} == {n for n in logged if n.startswith(prefix)}
    source = (ROOT / "dc_trl" / "callbacks.py").read_text()
    assert {name for name in names if name.startswith("length_decay/")} == set(
        re.findall(r'"(length_decay/\w+)"', source)
    )
    assert {name for name in names if name.startswith("collapse/")} == {f"collapse/{signal}" for signal in ADVICE}
    trls = {
        name for name in names if not name.startswith(("discrepancy/", "lagrangian/", "length_decay/", "collapse/"))
    }
    of_verl = {"kl", "k3_kl"} | {name for name in trls if f"discrepancy/{name}" in names}
    theirs = Path(trl.__file__).with_name("trainer").joinpath("grpo_trainer.py").read_text()
    for name in trls - of_verl:
        assert name in logged or f'"{name}"' in theirs, name


# --- messages


def messages_in(source):
    """Every text that a source file can print, with … for what it fills in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            yield " ".join("".join(parts).split())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(node.value.split())


def unknown_messages(quoted, files):
    texts = [text for file in files for text in messages_in(file.read_text())]
    return [
        message
        for message in quoted
        if not any(
            re.search(".*?".join(re.escape(piece.strip()) for piece in message.split("…")), text) for text in texts
        )
    ]


def quoted_messages(section):
    text = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", page("troubleshooting.md"), re.DOTALL | re.MULTILINE)[1]
    return [" ".join(block.split()) for block in blocks(text, "text")]


def test_the_messages_of_ours_are_in_the_source():
    quoted = quoted_messages("This package")
    assert len(quoted) > 20
    assert not unknown_messages(quoted, [*ROOT.glob("dc_trl/**/*.py"), *ROOT.glob("scripts/*.py")])


def test_the_messages_of_trl_are_in_its_source():
    folder = Path(trl.__file__).parent
    quoted = quoted_messages("TRL")
    assert len(quoted) > 3
    assert not unknown_messages(quoted, [folder / "trainer" / "grpo_config.py", *folder.glob("generation/*.py")])


@requires_vllm
def test_the_messages_of_vllm_are_in_its_source():
    folder = Path(find_spec("vllm").origin).parent / "v1"
    quoted = quoted_messages("vLLM")
    assert len(quoted) == 3
    assert not unknown_messages(quoted, [folder / "core" / "kv_cache_utils.py", folder / "worker" / "utils.py"])


# --- commands


def commands():
    """Commands of the GPU guide as lists of words, without variables in front and comments behind."""
    for block in blocks(page("gpu.md"), "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            yield words


def options(words):
    return {word.split("=")[0] for word in words if re.match(r"--\w", word)}


def known_options(parser):
    return {option for action in parser._actions for option in action.option_strings}


@pytest.fixture(scope="module")
def parsers():
    train, serve = load_script("train"), load_script("serve")
    return {
        "accelerate": known_options(launch_command_parser()),
        "scripts/train.py": known_options(TrlParser(train.ARGUMENTS)) | {"--config"},
        "scripts/serve.py": known_options(_parser_of(serve)),
    }


def _parser_of(script):
    """The parser that a script makes in `parse_arguments`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", lambda self, *args: self)
        return script.parse_arguments()


def test_the_options_of_the_gpu_guide_exist(parsers):
    seen = set()
    for words in commands():
        if words[0] == "accelerate":
            script = words.index("scripts/train.py")
            assert options(words[:script]) <= parsers["accelerate"], words
            assert options(words[script:]) <= parsers["scripts/train.py"], words
        elif words[0] == "python":
            end = words.index("--") if "--" in words else len(words)
            assert options(words[:end]) <= parsers[words[1]], words
        else:
            assert words[0] in ("vllm", "ssh", "export"), words
        seen.add(words[0])
    assert {"accelerate", "python", "vllm"} <= seen


@pytest.mark.long
@requires_vllm
def test_the_options_of_vllm_exist():
    shown = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "--help=all"],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    ).stdout
    known = set(re.findall(r"--[\w-]+", shown))
    for words in commands():
        if words[0] == "vllm":
            assert options(words) <= known, words
        elif "--" in words:
            assert options(words[words.index("--") + 1 :]) <= known, words
    for block in blocks(page("gpu.md"), "yaml"):
        assert options(yaml.safe_load(block).get("serve_options", [])) <= known


def test_the_settings_in_yaml_exist(parsers):
    settings = [block for name in ("gpu.md", "evaluation.md") for block in blocks(page(name), "yaml")]
    assert len(settings) == 2
    for block in settings:
        assert {f"--{name}" for name in yaml.safe_load(block)} <= parsers["scripts/train.py"], block


def test_the_files_that_pages_name_exist():
    for file in PAGES:
        for name in re.findall(r"\b(?:configs|scripts|tests|dc_trl)/[\w/.-]+\.(?:ya?ml|py)\b", file.read_text()):
            assert (ROOT / name).is_file(), (file.name, name)


def test_every_page_is_in_the_table_of_contents():
    index = page("index.md")
    listed = {word for block in blocks(index, "{toctree}") for word in block.split() if not word.startswith(":")}
    linked = set(re.findall(r"\((\w+)\.md\)", index))
    names = {file.stem for file in PAGES} - {"index"}
    assert names <= listed
    assert names <= linked


# --- the site


@pytest.mark.long
@pytest.mark.skipif(find_spec("sphinx") is None, reason="Sphinx is not installed (make docs)")
def test_the_site_builds_and_needs_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", tmp_path / "trees", DOCS]
    built = subprocess.run([*command, tmp_path / "site"], capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stderr[-3000:]
    for file in (tmp_path / "site").glob("*.html"):
        loaded = re.findall(r"<(?:script|img|link)\b[^>]*?(?:src|href)=\"((?:https?:)?//[^\"]+)", file.read_text())
        assert not loaded, (file.name, loaded)
    reference = (tmp_path / "site" / "api.html").read_text()
    assert 'id="dc_trl.DCGRPOTrainer"' in reference
    assert "system-message" not in reference
