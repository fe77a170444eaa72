"""docs/supported.md, docs/faq.md, docs/CONTRIBUTING.md and CITATION.cff: what they state is what is there."""

import ast
import re
import tomllib
from importlib.metadata import version

import pytest
import transformers
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from dc_trl.quantization.schemes import RESEARCH_BITS, SCHEMES
from dc_trl.version import __version__

from .helpers import ROOT
from .vllm_server import requires_vllm


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text()


def rows(heading):
    """The cells of the first table under a heading of docs/supported.md, without its head."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page("supported"), re.M | re.S)[1]
    table = re.search(r"^\|.*?(?=^[^|]|\Z)", section, re.M | re.S)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:] if line]


# --- versions

VERSIONS = {cells[0].strip("`"): cells[1:] for cells in rows("Versions")}


def allowed(package):
    """What pyproject.toml says of a package, wherever it says it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    (found,) = {
        str(requirement.specifier)
        for requirement in map(Requirement, (line for lines in lists for line in lines))
        if requirement.name == package
    }
    return found


def test_the_packages_that_decide_are_in_the_table():
    assert set(VERSIONS) == {"trl", "transformers", "vllm", "compressed-tensors", "torch"}


@pytest.mark.parametrize("package", VERSIONS)
def test_the_row_is_what_pyproject_and_the_pins_say(package):
    bounds, oldest, newest, alone = VERSIONS[package]
    specifier = Requirement(f"{package}{allowed(package)}").specifier
    assert Requirement(f"{package}{bounds.strip('`')}").specifier == specifier
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert newest == Version(pins[package]).public
    assert specifier.contains(newest)
    assert Version(oldest) <= Version(newest) <= Version(alone)


@pytest.mark.parametrize(
    "package", [pytest.param(name, marks=requires_vllm) if name == "vllm" else name for name in VERSIONS]
)
def test_what_is_installed_here_is_what_the_table_says_has_run(package):
    assert VERSIONS[package][2] == Version(version(package)).public


# --- models and number formats


# What tests call the random models that several of them share.
SHARED = {"Qwen3": "make_model", "Qwen3Moe": "make_experts"}


@pytest.mark.parametrize("cells", rows("Models"), ids=lambda cells: cells[0])
def test_each_model_is_in_the_tests_that_are_named(cells):
    families, files = (
        re.findall(pattern, cells[index]) for index, pattern in ((0, r"`(\w+)`"), (2, r"`(tests/\w+\.py)`"))
    )
    assert families
    assert files
    for family in families:
        assert any(hasattr(transformers, f"{family}{kind}Config") for kind in ("", "Text")), family
        name = SHARED.get(family, family)
        for file in files:
            assert re.search(rf"\b{name}(Config)?\b", (ROOT / file).read_text()), (family, file)


def test_every_scheme_has_a_row():
    named = {name for cells in rows("Number formats and hardware") for name in re.findall(r"`(\w+)`", cells[0])}
    assert named == {*SCHEMES, *RESEARCH_BITS}


@requires_vllm
def test_the_compute_capabilities_are_vllms():
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes as of_vllm

    stated = {cells[0].strip("`"): cells[1] for cells in rows("Number formats and hardware")}
    for scheme, kernel in {
        "fp8": of_vllm.CompressedTensorsW8A8Fp8,
        "fp8_block": of_vllm.CompressedTensorsW8A8Fp8,
        "int8": of_vllm.CompressedTensorsW8A8Int8,
        "int4": of_vllm.CompressedTensorsWNA16,
    }.items():
        least = kernel.get_min_capability()
        (cell,) = [cell for names, cell in stated.items() if scheme in re.findall(r"\w+", names)]
        assert re.search(r"\d+\.\d", cell)[0] == f"{least // 10}.{least % 10}", scheme


# --- questions


ENTRIES = dict(re.findall(r"^### ([^\n]+)\n(.*?)(?=^#|\Z)", page("faq"), re.M | re.S))


@pytest.mark.parametrize("entry", ENTRIES)
def test_each_question_has_a_thread_a_cause_and_what_to_do(entry):
    text = ENTRIES[entry]
    links = re.findall(r"\[[\w-]+#(\d+)\]\(https://github\.com/[\w-]+/[\w-]+/(?:issues|pull)/(\d+)\)", text)
    assert links
    assert all(named == linked for named, linked in links)
    assert len(links) == text.count("](https://github.com/")
    for part in ("Cause.", "Shown by", "Do"):
        assert text.count(f"- **{part}**") == 1, part


def test_the_metrics_and_fields_of_the_questions_exist():
    from dc_trl import DCGRPOConfig

    metrics = page("metrics")
    names = re.findall(r"`([^`\n]+)`", page("faq"))
    logged = [name for name in names if re.fullmatch(r"[a-z_]+/\w+", name)]
    assert len(logged) > 10
    for name in logged:
        assert f"`{name}`" in metrics, name
    others = {"dtype", "attn_implementation"}  # of TRL's ModelConfig
    fields = [name.partition(":")[0] for name in names if re.fullmatch(r"[a-z]\w*(?:: [\w.]+)?", name) and "_" in name]
    known = set(DCGRPOConfig.__dataclass_fields__) | others
    for field in fields:
        assert field in known or field in (
            "geometric_mask",
            "max_position_embeddings",
            "processed_logprobs",
            "rollout_func",
        ), field


# --- the rules of the house, and how to cite it


def test_the_files_and_names_of_the_guide_exist():
    text = page("CONTRIBUTING")
    for path in re.findall(r"`((?:dc_trl|tests|scripts|\.ci)/[\w./]+|[\w.]+\.(?:txt|toml))`", text):
        assert (ROOT / path).exists(), path
    for names, path in re.findall(r"`([A-Z_]+|[A-Z]\w+)` (?:in|of)\s+`((?:dc_trl|tests)/[\w/]+\.py)`", text):
        defined = {
            target.id
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        assert names in defined, (names, path)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([\w-]+)`", text)) <= targets


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what CFF 1.2.0 requires
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == __version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["title"], citation["license"]) == (project["name"], project["license"])
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= set(reference)
        assert all({"given-names", "family-names"} == set(author) for author in reference["authors"])
        assert reference["identifiers"][0]["value"].removeprefix("arXiv:") in reference["url"]


def test_the_paper_is_cited_as_on_the_model_card():
    card = (ROOT / "dc_trl" / "hub" / "model_card.md.jinja").read_text()
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"][0]
    assert paper["title"] in card
    names = " and ".join(f"{author['given-names']} {author['family-names']}" for author in paper["authors"])
    assert names in card
