"""A configuration file as its user writes it: what YAML makes of it, and what is refused by name."""

import pytest

from dc_trl import DCGRPOConfig
from dc_trl.command.arguments import RunArguments
from dc_trl.settings.recipes import RECIPES

from .helpers import ROOT, refuses


@pytest.fixture
def parse(tmp_path):
    def parse(text, *options):
        file = tmp_path / "config.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        usual = ["--config", str(file), "--output_dir", str(tmp_path / "out"), "--use_cpu", "true", "--bf16", "false"]
        return {name: value for part in RunArguments.parse([*usual, *options]) for name, value in vars(part).items()}

    return parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learning_rate: 1e-6", {"learning_rate": 1e-6}),  # YAML reads text
        ("rewards: math", {"rewards": ["math"]}),
        ("rewards: [math, arithmetic]", {"rewards": ["math", "arithmetic"]}),
        ("serve: auto\nserve_devices: 0", {"serve_devices": "0"}),  # a number, and one that is false
        ("collapse_alarm: off", {"collapse_alarm": "off"}),  # YAML reads false
        ("run_name: 2024-01-01", {"run_name": "2024-01-01"}),
        ("discrepancy_tolerance: 0.002", {"discrepancy_tolerance": 0.002}),
        ("lora_target_modules: all-linear", {"lora_target_modules": "all-linear"}),
        ("scale_rewards: false", {"scale_rewards": "none"}),
        ("generation_kwargs: {top_k: 0}", {"generation_kwargs": {"top_k": 0}}),
        (
            "use_vllm: true\nvllm_mode: server\nvllm_server_base_urls: ['http://a:1', 'http://b:1']",
            {"vllm_server_base_urls": ["http://a:1", "http://b:1"]},
        ),
        ("save_strategy: no", {"save_strategy": "no"}),  # YAML 1.1 reads false
    ],
)
def test_values_are_what_their_user_means(parse, text, expected):
    found = parse(text)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_of_the_command_line_decides_over_the_file(parse, recipe, tmp_path, capsys):
    quickstart = (ROOT / "configs" / "quickstart.yaml").read_text()
    decided = [*RECIPES[recipe], "discrepancy_tolerance", "lambda_init", "lambda_max"]
    machine = {"deployment_scheme": "fp8", "use_cpu": True, "bf16": False}
    alone = vars(DCGRPOConfig(str(tmp_path), recipe=recipe, **machine))
    found = parse(quickstart, f"--recipe={recipe}")
    if recipe == "paper":  # which the file has, with values of its own
        assert (found["constraint"], found["discrepancy_tolerance"]) == ("lagrangian", 0.0012)
        return
    assert {name: found[name] for name in decided} == {name: alone[name] for name in decided}
    said = capsys.readouterr().out
    assert f"recipe={recipe!r}" in said
    assert "constraint='lagrangian'" in said
    # What the command line says itself stays.
    found = parse(quickstart, "--recipe", recipe, "--epsilon", "0.3", "--constraint", "lagrangian")
    assert (found["epsilon"], found["constraint"]) == (0.3, "lagrangian")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: !!python/object/apply:os.system [true]", ["config.yaml cannot be read as YAML", "python/object"]),
        (b"\xff\xfe\x00b", ["config.yaml is not a text in UTF-8"]),
        ("", ["config.yaml holds", "name: value"]),
        ("max_steps: 3\nmax_steps: 4", ["config.yaml", "'max_steps' is set twice"]),
        ("collapse_alarm: on", ["collapse_alarm='on'", "'off', 'warn', 'stop'"]),
    ],
)
def test_what_is_refused_by_name(parse, text, words):
    with refuses(ValueError, *words):
        parse(text)
