"""How engines are named on the command lines of calibration and evaluation."""

import pytest
from transformers import PretrainedConfig

from dc_trl.evaluation.opened import EvaluatedModel, choose_engines
from dc_trl.sampling.engine_names import EngineSpec

from .helpers import refuses


URL = "http://127.0.0.1:9"
PLAIN = EvaluatedModel("m", "main", PretrainedConfig(), None)
QUANTIZED = EvaluatedModel("m", "main", PretrainedConfig(quantization_config={"quant_method": "x"}), None)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("fp8", ("fp8", "vllm", "fp8")),
        ("replica:int4_g32", ("replica:int4_g32", "replica", "int4_g32")),
        ("replica:int3", ("replica:int3", "replica", "int3")),
        ("https://host", ("https://host", "url", None)),
    ],
)
def test_an_engine_in_a_word(word, expected):
    assert EngineSpec.parse(word) == expected


@pytest.mark.parametrize("word", ["fp9", "int3", "replica:fp9", "http://"])
def test_a_word_that_means_none(word):
    with refuses(ValueError, f"engine={word!r}", "fp8_block", "replica:SCHEME", "URL"):
        EngineSpec.parse(word)


@pytest.mark.parametrize(
    ("model", "words", "scheme", "expected"),
    [
        (PLAIN, ["bf16", "fp8", "fp8"], None, [("bf16", "vllm", "bf16"), ("fp8", "vllm", "fp8")]),
        (PLAIN, ["fp8", "replica:int4"], None, [("fp8", "vllm", "fp8"), ("replica:int4", "replica", "int4")]),
        (PLAIN, [URL], None, [(URL, "url", "bf16")]),
        (QUANTIZED, None, None, [("vllm", "vllm", "as-is")]),
    ],
)
def test_engines_of_an_evaluation(model, words, scheme, expected):
    assert choose_engines(model, words, scheme) == expected


@pytest.mark.parametrize(
    ("model", "words", "scheme", "named"),
    [
        (PLAIN, ["fp8"], "fp8", "--scheme"),
        (PLAIN, ["fp8", "replica:fp8"], None, "--output"),
        (QUANTIZED, ["replica:fp8"], None, "quantized"),
    ],
)
def test_options_that_contradict_each_other(model, words, scheme, named):
    with refuses(ValueError, f"engine={words}", f"scheme={scheme!r}", named):
        choose_engines(model, words, scheme)
