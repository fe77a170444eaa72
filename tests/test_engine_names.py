"""How engines are named on the command lines of calibration and evaluation, the older spellings included."""

import pytest
from transformers import PretrainedConfig

from dc_trl.evaluation.engines import EvaluatedModel, choose_engines
from dc_trl.rollouts.engines import EngineSpec


URL = "http://127.0.0.1:9"
PLAIN = EvaluatedModel("m", "main", PretrainedConfig(), None)
QUANTIZED = EvaluatedModel("m", "main", PretrainedConfig(quantization_config={"quant_method": "x"}), None)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("fp8", ("fp8", "vllm", "fp8")),
        ("replica:int4_g32", ("replica:int4_g32", "replica", "int4_g32")),
        (f"{URL}/", (URL, "url", None)),
        ("https://host", ("https://host", "url", None)),
    ],
)
def test_an_engine_in_a_word(word, expected):
    assert EngineSpec.parse(word) == expected


@pytest.mark.parametrize("word", ["", "fp9", "replica:", "replica:fp9", "http://", "host:8000"])
def test_a_word_that_means_none(word):
    with pytest.raises(
        ValueError, match=r"is unknown: use a scheme .*replica:SCHEME .*the URL of a running"
    ) as refused:
        EngineSpec.parse(word)
    assert f"engine={word!r}" in str(refused.value)


BF16, FP8 = ("bf16", "vllm", "bf16"), ("fp8", "vllm", "fp8")


@pytest.mark.parametrize(
    ("words", "schemes", "url", "expected"),
    [
        # As documented.
        (None, None, None, [BF16]),
        (["bf16", "fp8", "fp8"], None, None, [BF16, FP8]),
        (["replica:int4"], None, None, [("replica:int4", "replica", "int4")]),
        (["fp8", "replica:int4"], None, None, [FP8, ("replica:int4", "replica", "int4")]),
        ([URL], ["fp8"], None, [(URL, "url", "fp8")]),
        ([URL], None, None, [(URL, "url", "bf16")]),
        # As before there was one parser of names.
        (None, ["bf16", "fp8"], None, [BF16, FP8]),
        (["vllm"], ["fp8"], None, [FP8]),
        (["replica"], None, None, [("replica:bf16", "replica", "bf16")]),
        (["replica"], ["fp8", "int4"], None, [("replica:fp8", "replica", "fp8"), ("replica:int4", "replica", "int4")]),
        (None, ["fp8"], URL, [(URL, "url", "fp8")]),
        (["vllm"], None, URL, [(URL, "url", "bf16")]),
    ],
)
def test_engines_of_an_evaluation(words, schemes, url, expected):
    assert choose_engines(PLAIN, words, schemes, url) == expected


@pytest.mark.parametrize(
    ("words", "url", "expected"),
    [
        (None, None, ("vllm", "vllm", "as-is")),
        (["vllm"], None, ("vllm", "vllm", "as-is")),
        (None, URL, (URL, "url", "as-is")),
        ([URL], None, (URL, "url", "as-is")),
    ],
)
def test_the_engine_of_a_checkpoint_that_is_quantized(words, url, expected):
    assert choose_engines(QUANTIZED, words, None, url) == [expected]


@pytest.mark.parametrize(
    ("model", "words", "schemes", "url", "message"),
    [
        (PLAIN, ["replica"], None, URL, "contradict each other"),
        (PLAIN, None, ["bf16", "fp8"], URL, "a server runs in one scheme"),
        (PLAIN, [URL], ["bf16", "fp8"], None, "a server runs in one scheme"),
        (PLAIN, ["fp8"], ["fp8"], None, "leave --scheme out"),
        (PLAIN, ["fp8", "replica:fp8"], None, None, "two in one scheme would share a folder"),
        (PLAIN, ["fp8", "replica"], None, None, "engine='replica' is unknown"),
        (QUANTIZED, None, ["fp8"], None, "evaluated as it is; leave --scheme out"),
        (QUANTIZED, ["replica"], None, None, "which only vLLM runs"),
        (QUANTIZED, ["replica:fp8"], None, None, "engine='replica:fp8': m is quantized already, which only vLLM runs"),
        (QUANTIZED, ["fp8"], None, None, "evaluated as it is; leave it out"),
        (QUANTIZED, ["fp9"], None, None, "engine='fp9' is unknown"),
    ],
)
def test_names_that_contradict_each_other(model, words, schemes, url, message):
    with pytest.raises(ValueError, match=message):
        choose_engines(model, words, schemes, url)
