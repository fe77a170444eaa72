"""The documentation against the code: what it quotes, names and commands has to exist."""

import ast
import dataclasses
import html
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
import tomllib
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args, get_origin
from urllib.parse import unquote, urlsplit

import pytest
import trl
import yaml
from accelerate.commands.launch import launch_command_parser
from trl import TrlParser

import dc_trl
from dc_trl import DCGRPOConfig
from dc_trl.callbacks.collapse_monitor import SIGNALS
from dc_trl.command import serve
from dc_trl.command.options import FILE, parser_of
from dc_trl.files import read_object
from dc_trl.records.time_parts import PARTS
from dc_trl.settings.contradictions import RULES, RULES_OF_A_COMPARISON, RULES_OF_A_CONSTRAINT
from dc_trl.settings.recipes import RECIPES
from dc_trl.training.arguments import ARGUMENTS

from .helpers import ROOT, Rollouts, make_config, make_model, make_prompts
from .vllm_server import requires_vllm


DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def page(name):
    return (DOCS / name).read_text()


def blocks(text, *languages):
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


# --- settings

# The classes whose fields a command line and a YAML file set, without TRL's own.
SETTINGS = [config for config in ARGUMENTS if not config.__module__.startswith("trl")]
THEIRS = {field.name: field for field in dataclasses.fields(trl.GRPOConfig)}


def default(field):
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def refused_lines():
    """The lines of settings that the page shows as refused."""
    return [line for block in blocks(page("configuration.md"), "{refused}") for line in block.splitlines()]


@pytest.fixture(scope="module")
def refused():
    """Line of settings → the error that they raise."""
    spec = importlib.util.spec_from_file_location("refused", DOCS / "refused.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {line: module.error_of(line) for line in refused_lines()}


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_docstring_describes_every_setting_of_ours(settings):
    assert f".. autoclass:: {settings.__module__}.{settings.__name__}\n" in page("configuration.md").replace(
        "dc_trl.DCGRPOConfig", "dc_trl.config.DCGRPOConfig"
    )
    arguments = inspect.getdoc(settings).partition("Args:\n")[2]
    entries = re.findall(r"^ {4}(\w+) \((.+)\):\n((?: {8}.*\n?)+)", arguments, re.MULTILINE)
    fields = {field.name: field for field in dataclasses.fields(settings) if field.name not in THEIRS}
    assert sorted(name for name, _, _ in entries) == sorted(fields)
    for name, kind, text in entries:
        stated = re.search(r"defaults to `(.+)`$", kind)
        assert (ast.literal_eval(stated[1]) if stated else None) == default(fields[name]), name
        assert stated or kind.endswith("*optional*"), name
        for option in get_args(fields[name].type) if get_origin(fields[name].type) is Literal else ():
            assert option in text, (name, option)


def test_the_recipes_are_shown():
    rows = re.findall(r"^\| `(\w+)` \| `(.+)` \| `(.+)` \| (.+) \|$", page("configuration.md"), re.MULTILINE)
    assert [name for name, *_ in rows] == list(RECIPES["trl"]) == list(RECIPES["paper"])
    for name, of_trl, of_paper, meaning in rows:
        assert ast.literal_eval(of_trl) == RECIPES["trl"][name]
        assert ast.literal_eval(of_paper) == RECIPES["paper"][name]
        assert meaning == (
            "see above" if name == "constraint" else DCGRPOConfig.__dataclass_fields__[name].metadata["help"]
        )


def test_every_contradiction_is_shown(refused):
    shown = {line: str(error) for line, error in refused.items()}
    for rule in (*RULES, *RULES_OF_A_COMPARISON, *RULES_OF_A_CONSTRAINT):
        words = ".*".join(map(re.escape, re.split(r"\{.*?\}", rule.message)))
        assert any(re.fullmatch(words, error) for error in shown.values()), (
            f"docs/configuration.md lacks {rule.message}"
        )
    for line, error in shown.items():
        assert any(name in error for name in re.findall(r"\w+(?=:)", line)), line


def test_every_error_of_the_configuration_is_shown(refused):
    path = Path(inspect.getfile(DCGRPOConfig))
    raising = {node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)}
    raised = [traceback.extract_tb(error.__traceback__)[-1] for error in refused.values()]
    missing = raising - {frame.lineno for frame in raised if frame.filename == str(path)}
    assert not missing, f"docs/configuration.md lacks an example of the errors in {path}, lines {missing}"


def test_the_python_reference_lists_every_public_name():
    (block,) = blocks(page("api.md"), "{eval-rst}")
    listed = re.search(r"autosummary::\n\n((?: {3}\w+\n)+)", block)[1].split()
    assert sorted(listed) == [name for name in dc_trl.__all__ if name != "__version__"]


# --- the code map


def test_the_code_map_has_a_line_for_every_folder():
    folders = re.findall(r"^\| `(\w+)/` \| ", page("code_map.md"), re.MULTILINE)
    tracked = {path.parent.name for path in ROOT.glob("dc_trl/*/*") if path.suffix == ".py"} | {"assets"}
    assert sorted(folders) == sorted(tracked)


def test_what_the_code_map_names_exists():
    text = page("code_map.md")
    for path in re.findall(r"`([\w/]+\.py)`", text):
        assert (ROOT if path.startswith("scripts/") else ROOT / "dc_trl").joinpath(path).is_file(), path
    named = re.findall(r"`([\w/]+\.py)`: (`\w+`(?:, `\w+`)*)", text)
    assert len(named) > 10
    for path, names in named:
        source = ast.parse((ROOT / "dc_trl" / path).read_text())
        defined = {node.name for node in ast.walk(source) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert set(re.findall(r"\w+", names)) <= defined, path


def test_the_changelog_says_where_modules_went():
    house = (ROOT / "CHANGELOG.md").read_text().partition("### The house")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| (`.+`) \| (`.+) \|$", house, re.MULTILINE)
    assert len(rows) > 15

    def files(cell):
        return [ROOT / "dc_trl" / f"{name.replace('.', '/')}.py" for name in re.findall(r"`([\w.]+)`", cell)]

    for old, new in rows:
        assert not [path for path in files(old) if path.exists()], old
        assert not [path for path in files(new) if not path.exists()], new


# --- metrics


def documented_metrics():
    return re.findall(r"^\| (`[\w/]+`(?:, `[\w/]+`)*) \|", page("metrics.md"), re.MULTILINE)


def test_metrics_are_those_that_a_run_logs(tmp_path, tokenizer):
    from dc_trl import DCGRPOTrainer
    from dc_trl.quantization.checkpoint import WriteCost

    names = {name for cell in documented_metrics() for name in re.findall(r"[\w/]+", cell)}
    logged = set()
    by_replica = {"deployment_scheme": "bf16", "constraint": "balance", "constraint_form": "two_sided_l1"}
    for settings, rollouts in [({"rollout_correction": "token_mask"}, Rollouts()), (by_replica, None)]:
        trainer = DCGRPOTrainer(
            make_model(),
            lambda completions, **kwargs: [len(set(text)) / 10 for text in completions],
            make_config(tmp_path, max_steps=1, **settings),
            train_dataset=make_prompts(),
            processing_class=tokenizer,
            rollout_func=rollouts,
        )
        trainer.train()
        logged = logged.union(*trainer.state.log_history)
    for prefix in ("discrepancy/", "trust/", "lagrangian/"):
        assert {name for name in names if name.startswith(prefix)} == {n for n in logged if n.startswith(prefix)}
    source = (ROOT / "dc_trl" / "callbacks" / "length_decay.py").read_text()
    assert {name for name in names if name.startswith("length_decay/")} == set(
        re.findall(r'"(length_decay/\w+)"', source)
    )
    source = (ROOT / "dc_trl" / "trainers" / "deployed.py").read_text()
    costs = {f"sync/{name}" for name in (*WriteCost._fields, "reload_seconds")}
    assert {name for name in names if name.startswith("sync/")} == set(re.findall(r'"(sync/\w+)"', source)) | costs
    assert {name for name in names if name.startswith("collapse/")} == {f"collapse/{signal}" for signal in SIGNALS}
    source = (ROOT / "dc_trl" / "trainers" / "routing.py").read_text()
    assert {name for name in names if name.startswith("routing/")} == set(re.findall(r'"(routing/\w+)"', source))
    assert {name for name in names if name.startswith("time/")} == {f"time/{part}" for part in PARTS}
    source = (ROOT / "dc_trl" / "trainers" / "overlap.py").read_text()
    assert {name for name in names if name.startswith("overlap/")} == set(re.findall(r'"(overlap/\w+)"', source))
    source = (ROOT / "dc_trl" / "trainers" / "batching.py").read_text()
    assert {name for name in names if name.startswith("batching/")} == set(re.findall(r'"(batching/\w+)"', source))
    ours = ("batching/", "discrepancy/", "trust/", "lagrangian/", "length_decay/", "sync/", "overlap/", "routing/")
    ours += ("time/", "collapse/")
    trls = {name for name in names if not name.startswith(ours)}
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
    return {
        "accelerate": known_options(launch_command_parser()),
        "scripts/train.py": known_options(TrlParser(ARGUMENTS)) | {"--config"},
        "dc-trl serve": known_options(serve.make_parser()),
    }


def test_the_options_of_the_gpu_guide_exist(parsers):
    seen = set()
    for words in commands():
        if words[0] == "accelerate":
            script = words.index("-m" if "-m" in words else "scripts/train.py")
            assert words[script] != "-m" or words[script + 1 : script + 3] == ["dc_trl", "train"], words
            assert options(words[:script]) <= parsers["accelerate"], words
            assert options(words[script:]) <= parsers["scripts/train.py"], words
        elif words[0] == "dc-trl":
            end = words.index("--") if "--" in words else len(words)
            parser = parser_of(words[1], read_object(FILE)["commands"][words[1]])
            assert options(words[:end]) <= known_options(parser), words
        elif words[0] == "python":
            end = words.index("--") if "--" in words else len(words)
            assert options(words[:end]) <= parsers[words[1]], words
        else:
            assert words[0] in ("vllm", "ssh", "export"), words
        seen.add(words[0])
    assert {"accelerate", "dc-trl", "vllm"} <= seen


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
    for file in [*PAGES, ROOT / "README.md"]:
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


def broken_links(site: Path) -> list[tuple[str, str]]:
    """(page, address) of what pages of a site load or link, and that is not there: files, and places in pages."""
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(site.rglob("*.html"))}
    places = {file: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for file, text in texts.items()}
    broken = []
    for file, text in texts.items():
        for address in re.findall(r'<[^>]*?\s(?:src|href|poster|data)="([^"]+)"', text):
            url = urlsplit(html.unescape(address))
            target = (file.parent / unquote(url.path)).resolve() if url.path else file
            if url.scheme or url.netloc:
                continue
            is_there = target.exists() and (not url.fragment or unquote(url.fragment) in places.get(target, ()))
            broken += [] if is_there else [(str(file.relative_to(site)), address)]
    return broken


@pytest.mark.long
@pytest.mark.skipif(find_spec("sphinx") is None, reason="Sphinx is not installed (make docs)")
def test_the_site_builds_and_needs_nothing_from_elsewhere(tmp_path, refused):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", tmp_path / "trees", DOCS]
    built = subprocess.run([*command, tmp_path / "site"], capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stderr[-3000:]
    for file in (tmp_path / "site").glob("*.html"):
        loaded = re.findall(r"<(?:script|img|link)\b[^>]*?(?:src|href)=\"((?:https?:)?//[^\"]+)", file.read_text())
        assert not loaded, (file.name, loaded)
    assert broken_links(tmp_path / "site") == []
    (tmp_path / "site" / "broken.html").write_text('<img src="images/none.png"><a href="tour.html#nowhere">')
    assert broken_links(tmp_path / "site") == [
        ("broken.html", "images/none.png"),
        ("broken.html", "tour.html#nowhere"),
    ]
    reference = (tmp_path / "site" / "api.html").read_text()
    assert 'id="dc_trl.DCGRPOTrainer"' in reference
    assert "system-message" not in reference
    settings = (tmp_path / "site" / "configuration.html").read_text()
    assert "system-message" not in settings
    words = html.unescape(re.sub(r"<[^>]+>", "", settings))
    for config in SETTINGS:
        module = "dc_trl" if config is DCGRPOConfig else config.__module__
        for field in dataclasses.fields(config):
            assert (f'id="{module}.{config.__name__}.{field.name}"' in settings) == (field.name not in THEIRS)
    for line, error in refused.items():
        assert line in words
        assert str(error) in words


@pytest.mark.long
def test_the_commands_of_the_first_pages_exist(parsers):
    for block in blocks(page("quickstart.md") + page("install.md"), "bash"):
        words = shlex.split(block)
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        elif words[1] == "-c":
            done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            assert done.stdout.split() == [dc_trl.__version__, "DCGRPOTrainer"]
        else:
            # The report's script makes its parser as it runs; tests/test_readme.py runs the same command.
            assert options(words) <= parsers.get(words[1], {"--output"}), words
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    cells = re.findall(r"^\| (`.*?`) \|", page("install.md"), re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(set(extras) - {"test", "dev"})
