"""The documentation against the code: public names, options of its commands, links of its site, what it refuses."""

import html
import importlib.util
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from accelerate.commands.launch import launch_command_parser

import dc_trl
from dc_trl.command import COMMANDS
from dc_trl.command.arguments import ARGUMENTS
from dc_trl.constraint import thresholds
from dc_trl.settings.contradictions import CONTRADICTIONS

from .helpers import (
    ROOT,
    code_blocks,
    commands_in,
    succeed,
)
from .vllm_server import requires_vllm


DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md", ROOT / "scripts" / "study" / "RESULTS.md"]


def page(name):
    return (DOCS / name).read_text()


# --- settings


@pytest.fixture(scope="module")
def refused():
    """Line of settings of docs/settings.md → the error that they raise."""
    spec = importlib.util.spec_from_file_location("settings_tables", DOCS / "settings_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lines = [line for block in code_blocks(page("settings.md"), "{refused}") for line in block.splitlines()]
    return {line: str(module.error_of(line)) for line in lines}


def test_every_contradiction_has_an_example(refused):
    for rule in CONTRADICTIONS:
        for name in rule.named.split():
            beside = " and ".join(f"{other}=.*" for other in rule.beside)
            words = f"{name}=.* contradicts {beside}: {re.escape(rule.remedy)}."
            assert any(re.fullmatch(words, error) for error in refused.values()), words
    for line, error in refused.items():
        assert any(name in error for name in re.findall(r"\w+(?=:)", line)), line


# --- names


def test_the_python_reference_lists_every_public_name():
    (block,) = code_blocks(page("api.md"), "{eval-rst}")
    listed = re.search(r"autosummary::\n\n((?: {3}\w+\n)+)", block)[1].split()
    assert sorted(listed) == [name for name in dc_trl.__all__ if name != "__version__"]


def test_messages_name_pages_that_exist_at_the_address_of_the_project(tmp_path):
    """In an installed package with a repository, and in a clone."""
    sources = "".join(file.read_text() for file in (ROOT / "dc_trl").rglob("*.py"))
    named = set(re.findall(r"(?:docs|\{DOCS\})/(\w+)\.md", sources))
    assert "which_one" in named
    assert not [name for name in named if not (DOCS / f"{name}.md").is_file()]
    metadata = tmp_path / "dc_trl-9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    code = (
        "from dc_trl.constraint.thresholds import *; print(lag_warning(ConstraintSettings('static'), 'a lag'), "
        "ConstraintSettings.__dataclass_fields__['rollout_correction'].metadata['help'])"
    )
    for url, place in (
        ("Paper, https://a.org", "docs"),
        ("Repository, https://a.org/b", "https://a.org/b/blob/main/docs"),
    ):
        metadata.write_text(f"Name: dc_trl\nVersion: 9\nProject-URL: {url}\n")
        said = succeed([sys.executable, "-c", code], env=environment, cwd=tmp_path).stdout
        assert f"see {place}/which_one.md" in said
        assert f"see {place}/corrections.md" in said


def test_an_earlier_name_goes_on_working():
    with pytest.warns(DeprecationWarning, match=r"LambdaLoggingCallback.*HistoryCallback"):
        from dc_trl import LambdaLoggingCallback
    assert LambdaLoggingCallback is dc_trl.HistoryCallback


# --- the bounds of k3


def test_the_bounds_of_k3_stand_on_one_page():
    """In the order of their use: lag, lag, format, signed form, clip."""
    bounds = [
        thresholds.LAG_COSTS,
        thresholds.FAR,
        thresholds.NO_REMEDY_IN_STEP,
        thresholds.PULLS_HARM_IN_STEP,
        thresholds.CLIP_COSTS_IN_STEP,
    ]
    table = page("which_one.md").partition("## The bounds of k3")[2].partition("## ")[0]
    assert [float(value) for value in re.findall(r"^\|[^|]+\| ([\d.]+) \|", table, re.MULTILINE)] == bounds
    elsewhere = "\n".join(file.read_text().replace(table, "") for file in DOCS.glob("*.md"))
    assert not re.findall(rf"k3.*(?:above|below|bound of) (?:{'|'.join(map(str, bounds))})(?!\d)", elsewhere)


# --- commands


def commands():
    """Commands of the pages as lists of words, without variables in front and comments behind."""
    for file in PAGES:
        for block in code_blocks(file.read_text(), "bash"):
            for words in commands_in(block):
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words = words[1:]
                if words:
                    yield file.name, words


def options(words):
    return {word.split("=")[0] for word in words if re.match(r"--\w", word)}


def known_options(parser):
    return {option for action in parser._actions for option in action.option_strings}


@pytest.fixture(scope="module")
def parsers():
    modules = {name: import_module(f"dc_trl.command.{module}") for name, (module, _) in COMMANDS.items()}
    return {name: known_options(module.make_parser()) | {"--config"} for name, module in modules.items()}


def own_words(words):
    """What is this program's among the words of a command: without what goes on to `vllm serve`."""
    ends = [words.index(end) for end in ("--", "--serve_options") if end in words]
    return words[: min(ends, default=len(words))]


def test_the_options_of_the_pages_exist(parsers):
    seen = set()
    launcher = known_options(launch_command_parser())
    for file, words in commands():
        if words[0] == "accelerate":
            (start,) = [index for index, word in enumerate(words) if word in ("-m", "scripts/train.py")]
            assert options(words[:start]) <= launcher, (file, words)
            words = ["dc-trl", "train", *words[start + (3 if words[start] == "-m" else 1) :]]
        elif words[0] == "python" and words[1] == "scripts/train.py":
            words = ["dc-trl", "train", *words[2:]]
        if words[0] == "dc-trl" and len(words) > 1 and words[1] in parsers:
            assert options(own_words(words)) <= parsers[words[1]] | {"--help"}, (file, words)
            seen.add(words[1])
    assert {"train", "serve", "calibrate", "evaluate", "report"} <= seen


@requires_vllm
def test_the_options_of_vllm_exist():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = known_options(make_arg_parser(FlexibleArgumentParser()))
    for file, words in commands():
        theirs = words if words[:2] == ["vllm", "serve"] else words[len(own_words(words)) + 1 :]
        assert options(theirs) <= known, (file, words)


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
    pages = {name: (tmp_path / "site" / f"{name}.html").read_text() for name in ("api", "settings", "which_one")}
    assert not [name for name, text in pages.items() if "system-message" in text]
    assert 'id="dc_trl.DCGRPOTrainer"' in pages["api"]
    assert re.search(r'data-label="evidence".*<wbr>.*<a href="_images/study_lag.png"><img', pages["which_one"], re.S)
    for config in ARGUMENTS:
        for name in vars(config).get("__annotations__", {}) if config.__module__.startswith("dc_trl") else ():
            assert f'id="{config.__name__}.{name}"' in pages["settings"]
    words = html.unescape(re.sub(r"<[^>]+>", "", pages["settings"]))
    for line, error in refused.items():
        assert line in words
        assert error in words
