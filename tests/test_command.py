"""`dc-trl`: its help and its refusals, and the wheel that it comes from."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from transformers.hf_argparser import string_to_bool

from dc_trl import __version__
from dc_trl.command import COMMANDS, main, subcommand, verify
from dc_trl.command.arguments import ARGUMENTS, RunArguments
from dc_trl.command.train import make_parser
from dc_trl.data.sources import BENCHMARKS, DAPO
from dc_trl.evaluation.results import Evaluation
from dc_trl.settings.command_line import described
from dc_trl.settings.fields import own_fields
from dc_trl.settings.paths import config_file, shipped

from .helpers import (
    ROOT,
    TINY_MODEL,
    read_json,
    succeed,
)


OPTIONS = re.compile(r"^  --(\w+)(?: ([A-Z]+))? ", re.MULTILINE)
FIELDS = {field.name: config for config in ARGUMENTS for field in fields(config) if field.init}


def help_of(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [["watch", "DIR"], ["verify", "DIR"], ["evaluate", "--engine"]])
def test_a_password_in_an_address_is_refused_unseen(words, capsys, tmp_path):
    command, *others = words
    url = "http://me:hunter2@127.0.0.1:9"
    given = ["--model", str(TINY_MODEL), *others, url] if command == "evaluate" else [url, str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main([command, *given])
    shown = "".join(capsys.readouterr()) + str(ended.value.code)
    assert "hunter2" not in shown
    assert "VLLM_API_KEY" in shown


def test_what_nobody_foresaw_is_no_answer_of_verify(capsys):
    assert subcommand(verify.make_parser, code=2)(lambda args: {}["no such key"])(["http://a:1", "b"]) == 2
    assert "no such key" in capsys.readouterr().err


def test_the_help_of_training_is_short_and_has_our_fields(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = help_of(capsys, "train", "--help")
    assert shown.startswith("usage: dc-trl train --config NAME_OR_FILE")
    lines = shown.splitlines()
    assert len(lines) <= 200
    assert max(map(len, lines)) <= 80 + len("\u0304\u0304\u0304")  # the macron of δ̄ takes no column
    names = [name for name, _ in OPTIONS.findall(shown)]
    assert len(names) == len(set(names))
    ours = {name for config in ARGUMENTS for name in own_fields(config)}
    assert len(ours) > 50
    assert ours == {*names} - {"config"}
    assert {"learning_rate", "output_dir", "use_vllm", "lora_r", "push_to_hub"} <= {*re.findall(r"--(\w+)", shown)}
    # The lines are those that the parser, with TRL's fields, makes of the same declarations.
    actions = {action.dest: action for action in reversed(make_parser()._actions)}
    for name in ours:
        action = actions[name]
        kind = bool if action.type is string_to_bool else action.type
        line = described(name, kind, action.help, 80, action.choices, action.default)
        assert f"\n{line}\n" in shown, name
    assert "--help all" in lines[-1]


def test_all_fields_can_be_listed_and_one_can_be_read_in_full(capsys):
    shown = help_of(capsys, "train", "--help", "all")
    types = dict(OPTIONS.findall(shown))
    assert set(types) == {*FIELDS, "config", "help"}
    assert (types["max_steps"], types["learning_rate"], types["use_vllm"]) == ("INT", "FLOAT", "BOOL")
    meaning = FIELDS["discrepancy_level"].__dataclass_fields__["discrepancy_level"].metadata["help"]
    one = " ".join(help_of(capsys, "train", "-h", "discrepancy_level").split())
    assert meaning in one
    assert meaning in " ".join(shown.split())
    assert "{token, sequence} [token]" in one


def test_an_integer_is_shown_as_int(capsys):
    for name, option in (("calibrate", "prompts"), ("evaluate", "samples"), ("serve", "port")):
        assert f"--{option} INT " in help_of(capsys, name, "--help")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_loads_no_library_that_takes_seconds(name):
    code = (
        "import sys\nfrom dc_trl.command import main\n"
        f"try: main(['{name}', '--help'])\nexcept SystemExit as end: print(end.code)\n"
        "print(*{'torch', 'transformers', 'trl', 'datasets', 'sympy'} & {*sys.modules}, 'end')"
    )
    shown = succeed([sys.executable, "-c", code]).stdout
    assert shown.startswith(f"usage: dc-trl {name}")
    assert shown.splitlines()[-2:] == ["0", "end"]
    assert "scripts/" not in shown


def test_the_help_names_all_benchmarks(capsys):
    shown = help_of(capsys, "evaluate", "--help")
    assert not [name for name in BENCHMARKS if name not in shown]
    assert DAPO.hub_id in "".join(help_of(capsys, "prepare-data", "--help").split())


@pytest.mark.parametrize(("word", "name"), [("trian", "train"), ("prepare_data", "prepare-data")])
def test_an_unknown_command_gets_the_nearest_name(word, name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([word])
    assert ended.value.code == 2
    assert f"error: {word!r} is no command: did you mean {name}?" in capsys.readouterr().err


WRONG = """
xyz | 'xyz' is no command: use one of train, serve
train | no setting is given: name a configuration by --config
train --lamda_init 0.5 | --lamda_init is not a field of the configuration: did you mean --lambda_init?
train --help lamda_init | lamda_init is not a field of the configuration: did you mean lambda_init?
train --max_step 3 | did you mean --max_steps?
train --config quickstart --max_steps | expected one argument
train --config quickstart --reward_weights nan | reward_weights=nan
train --max_steps many | invalid int value: 'many'
train --config quikstart | config='quikstart' is not a file: give the path of a YAML file
train --config wrong.yaml | lamda_lr is not a field of the configuration: did you mean lambda_lr?
calibrate --model a/b | the following arguments are required: --engine
calibrate --model a/b --engine bf16 --device banana | device='banana' cannot be used
calibrate --model a/b --engine bf16 --output wrong.yaml | output='wrong.yaml'
evaluate --model a/b --chat_template_kwargs [1] | --chat_template_kwargs: invalid json_object value: '[1]'
evaluate --model ./none | model='./none' does not exist
prepare-data --file no.parquet --output out | no.parquet
"""


@pytest.mark.parametrize("row", WRONG.strip().splitlines())
def test_what_is_wrong_is_refused_in_one_line(row, tmp_path, monkeypatch, capsys):
    words, expected = row.split(" | ")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.yaml").write_text("lamda_lr: 1\n")
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    told = capsys.readouterr().err if ended.value.code == 2 else ended.value.code
    assert told.startswith("error: ")
    assert expected in told
    assert "\n" not in told.strip()
    assert {path.name for path in tmp_path.iterdir()} == {"wrong.yaml"}


def test_the_version_needs_no_library(tmp_path):
    (tmp_path / "yaml").symlink_to(Path(yaml.__file__).parent)  # an interpreter that has YAML and nothing else
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = succeed([sys.executable, "-S", "-m", "dc_trl", "--version"], env=environment)
    assert done.stdout == f"dc_trl {__version__}\n"


def test_shipped_files_are_found_from_anywhere_and_files_of_ones_own_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = RunArguments.parse(["--config=quickstart", "--max-steps", "3"])
    assert arguments.trainer.max_steps == 3
    assert arguments.trainer.output_dir == "runs/quickstart"
    assert Path(arguments.model.model_name_or_path).samefile(TINY_MODEL)
    assert config_file("configs/quickstart.yaml") == config_file("quickstart.yaml") == config_file("quickstart")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.yaml").write_text("max_steps: 7\n")
    (tmp_path / "quickstart").mkdir()  # a directory is no configuration
    assert config_file("configs/quickstart.yaml") == Path("configs/quickstart.yaml")
    assert config_file("quickstart").samefile(ROOT / "configs" / "quickstart.yaml")
    for name in ("dc_trl/assets", "dc_trl/no_model", "Qwen/Qwen3-8B", "configs/none.yaml"):
        assert shipped(name) == name


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Runs a program of a fresh environment with the wheel, which finds all but dc_trl where this one does."""
    folder = tmp_path_factory.mktemp("wheel")
    source, wheels, environment = folder / "source", folder / "wheels", folder / "environment"
    for name in ("dc_trl", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(wheels), str(source)]
    subprocess.run(build, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    assert "Description-Content-Type: text/markdown" in metadata
    assert "# dc_trl" in metadata
    assert "](docs/" not in metadata  # where an index has no such file
    subprocess.run([*pip, "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    # A folder that a .pth file names is searched, and its own .pth files, of editable installs, are not read.
    (own,) = environment.glob("lib/*/site-packages")
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (own / "others.pth").write_text("\n".join(others) + "\n")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(program, *words, cwd):
        return succeed([str(environment / "bin" / program), *words], cwd=cwd, env=variables).stdout

    run.folder = own / "dc_trl"
    return run


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_wheel_trains_evaluates_and_reports_from_an_empty_directory(installed, tmp_path):
    where = installed("python", "-c", "import dc_trl; print(dc_trl.__file__)", cwd=tmp_path).strip()
    assert Path(where).parent == installed.folder
    assert installed("dc-trl", "--version", cwd=tmp_path) == f"dc_trl {__version__}\n"
    words = "train --config quickstart --max_steps 10 --eval_size 64"
    shown = installed("dc-trl", *words.split(), cwd=tmp_path)
    assert "held-out problems: 64" in shown
    run = tmp_path / "runs" / "quickstart"
    assert read_json(run / "summary.json")["steps"] == 10
    words = "evaluate --model runs/quickstart --benchmarks arithmetic --engine replica:fp8 --limit 16 --samples 2"
    shown = installed("dc-trl", *words.split(), "--max_tokens", "48", cwd=tmp_path)
    assert "arithmetic avg@2" in shown
    evaluation = Evaluation.load(tmp_path / "runs" / "evaluation" / "fp8" / "results.json")
    assert len(evaluation.results["arithmetic"].per_problem) == 16
    installed("dc-trl", "report", "runs/quickstart", "--output", "report.html", cwd=tmp_path)
    assert (tmp_path / "report.html").read_text().count("<figure") > 3
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "report.html"}
