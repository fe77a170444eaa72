"""docs/supported.md, docs/faq.md and CITATION.cff: what they state is what is there."""

import re
import tomllib
from importlib.metadata import version

import pytest
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


def test_the_metrics_and_fields_of_the_questions_exist():
    from dc_trl import DCGRPOConfig

    metrics = page("metrics")
    names = re.findall(r"`([^`\n]+)`", page("faq"))
    logged = [name for name in names if re.fullmatch(r"[a-z_]+/\w+", name)]
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
