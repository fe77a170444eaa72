"""The replica against quantization by hand, against the library's own, and against a forward pass."""

import copy
import itertools
from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Gemma2Config,
    GenerationConfig,
    GPT2Config,
    GptOssConfig,
    MiniMaxConfig,
    Qwen3Config,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from dc_trl.quantization import attention
from dc_trl.quantization.checkpoint import CheckpointWriter
from dc_trl.quantization.deployed_forward import DeployedForward
from dc_trl.quantization.fake_quantize import (
    ActivationQuantizer,
    compressed_weight,
    fake_quantize_weight,
    multiply_numbers,
    round_to_float8,
)
from dc_trl.quantization.rounding import _with_late_rounding
from dc_trl.quantization.schemes import SCHEMES, resolve_scheme
from dc_trl.quantization.tensors import policy_tensors
from dc_trl.sampling.replica import Replica

from .helpers import (
    TWO_EXPERTS,
    assert_same_tensors,
    assert_same_weights,
    largest_allocation,
    make_experts,
    make_model,
    make_tall_model,
    plain_logps,
    random_model,
    refuses,
)


quantized = pytest.mark.parametrize("scheme", ["fp8", "fp8_block", "int8", "int4", "int4_g32"])
PROMPTS = [[20, 30, 40], [50], [60, 70, 80, 90, 100]]


def sampling(**overrides):
    return GenerationConfig(
        **{"max_new_tokens": 12, "do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": [1]} | overrides
    )


def by_hand(weight, scheme):
    """Round trip of a weight through each format, written out from its definition."""
    rows, columns = weight.shape
    if scheme == "mxfp8":
        return torch.tensor(mxfp8(weight.numpy()))
    if scheme.startswith("nvfp4"):
        return torch.tensor(nvfp4(weight.numpy(), 64, by_inverse=False))
    height, width = {"fp8_block": (128, 128), "int4": (1, 128), "int4_g32": (1, 32)}.get(scheme, (1, columns))
    out = torch.nn.functional.pad(weight, (0, 0, 0, -rows % height))
    blocks = out.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    largest = blocks.abs().amax((1, 3), keepdim=True)
    if scheme.startswith("fp8"):
        scale = largest / 448
        numbers = (blocks / scale).to(torch.float8_e4m3fn).float()
    elif scheme == "int8":
        scale = largest / 127.5
        numbers = (blocks / scale).round().clamp(-128, 127)
    else:
        scale = (largest / 7.5).to(torch.bfloat16).float()  # as vLLM's kernels keep it
        numbers = (blocks / scale).round().clamp(-8, 7)
    return (numbers * scale).flatten(2).flatten(0, 1)[:rows]


@quantized
def test_weights_by_hand(scheme):
    torch.manual_seed(0)
    weight = torch.randn(200, 256)
    args = scheme_of(scheme).weights
    torch.testing.assert_close(fake_quantize_weight(weight, args), by_hand(weight, scheme), rtol=1e-5, atol=1e-6)


def awkward_activations(dtype):
    torch.manual_seed(0)
    value = (torch.randn(5, 7, 256) * torch.randn(5, 7, 1).exp() * 10).to(dtype)
    value[0, 0] = 0
    value[1, 1] *= 1e-9
    return value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("preset", "largest"), [("FP8_DYNAMIC", 448), ("W8A8", 127)])
def test_activations_by_token_are_bit_for_bit_those_of_vllm(preset, largest, dtype):
    value = awkward_activations(dtype)
    numbers, scale = ActivationQuantizer(preset_name_to_scheme(preset, ["Linear"]).input_activations).quantize(value)
    # As in vLLM's QuantFP8.forward_native and dynamic_scaled_int8_quant.
    expected = value.float().abs().amax(-1, keepdim=True) / largest
    if preset == "W8A8":
        assert torch.equal(numbers, (value * expected.clamp(min=1e-37).reciprocal()).round())
    else:
        expected = expected.clamp(min=1 / (448 * 512))
        exact = (value.float() * expected.reciprocal()).clamp(-448, 448)
        assert torch.equal(numbers, exact.to(torch.float8_e4m3fn).float())
    assert torch.equal(scale, expected.clamp(min=torch.finfo(torch.float32).tiny))


@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "W8A8"])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_products_of_numbers_are_exact_so_that_no_order_of_their_sums_matters(preset, kept):
    """Beside sums of integers: E4M3's numbers are multiples of 2^-9, and float32 would round each partial sum."""
    quantizer = ActivationQuantizer(preset_name_to_scheme(preset, ["Linear"]).input_activations)
    activations, linear = awkward_activations(torch.float32), nn.Linear(256, 64, bias=False)
    weight, scale = quantizer.quantize(torch.randn(64, 256))
    linear.weight.data, linear.weight_scale = weight.to(kept), scale.flatten()
    multiply_numbers(linear, quantizer)
    numbers, token_scale = quantizer.quantize(activations)
    sums = ((numbers * 512).long() @ (weight * 512).long().t()).double() / 512**2
    with torch.no_grad():
        assert torch.equal(linear(activations), sums.float() * token_scale * scale.flatten())


# NVFP4 and MXFP8 from their specifications (OCP Microscaling Formats 1.0, tables 1 to 6; NVIDIA's NVFP4), in numpy.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E4M3 = np.array([(m + 8 * (e > 0)) / 8 * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][:-1], np.float32)


def nearest(values, magnitudes):
    """The nearest number of a format; of two equally near ones that with the even code; beyond the last the last."""
    size = np.minimum(np.abs(values), magnitudes[-1]).astype(np.float64)
    above = np.searchsorted(magnitudes, size)
    low, high = magnitudes[np.maximum(above - 1, 0)].astype(np.float64), magnitudes[above].astype(np.float64)
    up = (high - size < size - low) | ((high - size == size - low) & (above % 2 == 0))
    return np.copysign(np.where(up, high, low), values).astype(np.float32)


def nvfp4(values, global_scale, by_inverse):
    """Round trip with a scale of the tensor; engines multiply activations by inverses where weights are divided."""
    blocks = values.reshape(*values.shape[:-1], -1, 16)
    peak = np.abs(blocks).max(-1, keepdims=True)
    sixth = peak * (np.float32(1) / np.float32(6)) if by_inverse else peak / np.float32(6)
    scale = nearest(sixth * np.float32(global_scale), E4M3) / np.float32(global_scale)
    divisor = np.where(scale == 0, np.float32(1), scale)
    scaled = blocks * (np.float32(1) / divisor) if by_inverse else blocks / divisor
    return (nearest(scaled, E2M1) * scale).reshape(values.shape)


def mxfp8(values):
    """Round trip with the least power of two with which no number is beyond 448."""
    blocks = values.reshape(*values.shape[:-1], -1, 32)
    mantissa, exponent = np.frexp(np.abs(blocks).max(-1, keepdims=True))  # 448 is 0.875 × 2^9
    scale = np.ldexp(np.float32(1), np.maximum(exponent - 9 + (mantissa > 0.875), -126))
    return (nearest(blocks / scale, E4M3) * scale).reshape(values.shape)


@cache
def scheme_of(name):
    """Resolved once, and not for each example."""
    return resolve_scheme(name, make_model(128))


def of_width(columns):
    """Tensors of four rows whose numbers bfloat16 holds, as activations are, of very different sizes."""
    numbers = st.tuples(st.integers(-255, 255), st.integers(-12, 6)).map(lambda pair: pair[0] * 2.0 ** pair[1] / 16)
    return arrays(np.float32, (4, columns), elements=numbers)


def rounded_activations(value, scheme):
    return ActivationQuantizer(scheme.input_activations).fake_quantize(value.bfloat16())


@given(of_width(32))
def test_nvfp4_by_its_specification(values):
    scheme, value = scheme_of("nvfp4"), torch.tensor(values)
    np.testing.assert_array_equal(fake_quantize_weight(value, scheme.weights), nvfp4(values, 64, by_inverse=False))
    np.testing.assert_array_equal(rounded_activations(value, scheme).float(), nvfp4(values, 0.5, by_inverse=True))


@given(of_width(64))
def test_mxfp8_by_its_specification(values):
    scheme, value = scheme_of("mxfp8"), torch.tensor(values)
    # For a largest magnitude of exactly 1.75 × 2^n, compressed-tensors takes a scale that is twice as large.
    if (np.frexp(np.abs(values.reshape(-1, 32)).max(-1))[0] != 0.875).all():
        np.testing.assert_array_equal(fake_quantize_weight(value, scheme.weights), mxfp8(values))
    np.testing.assert_array_equal(rounded_activations(value, scheme).float(), mxfp8(values))


@pytest.mark.parametrize("scheme", ["nvfp4", "nvfp4a16", "mxfp8"])
@given(weight=of_width(64))
def test_compressed_tensors_decompresses_what_the_replica_computes_with(scheme, weight):
    resolved, weight = scheme_of(scheme), torch.tensor(weight)
    compressor = BaseCompressor.get_value_from_registry(resolved.format.value)
    theirs = compressor.decompress(compressed_weight(weight, resolved), resolved)["weight"]
    assert torch.equal(theirs.float(), fake_quantize_weight(weight, resolved.weights))
    assert theirs.dtype == torch.bfloat16  # what the replica keeps it in, so nothing is rounded again


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM's own arithmetic is compared")
def test_activations_in_blocks_are_bit_for_bit_those_of_vllm():
    """With the arithmetic with which vLLM emulates its kernels, from the scales that the checkpoint holds."""
    from vllm.model_executor.layers.quantization.utils import mxfp8_utils, nvfp4_emulation_utils

    value, scheme = awkward_activations(torch.bfloat16).flatten(0, 1), scheme_of("nvfp4")
    stored = compressed_weight(torch.randn(64, 256), scheme)
    theirs = nvfp4_emulation_utils.ref_nvfp4_quant_dequant(value, stored["input_global_scale"], 16)
    assert torch.equal(rounded_activations(value, scheme), theirs)
    theirs = mxfp8_utils.dequant_mxfp8_to_bf16(*mxfp8_utils._mxfp8_e4m3_quantize_torch(value))
    assert torch.equal(rounded_activations(value, scheme_of("mxfp8")), theirs)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM's own arithmetic is compared")
def test_stored_weights_in_blocks_are_read_by_vllm_as_the_replicas():
    from vllm.model_executor.layers.quantization.utils import mxfp8_utils, nvfp4_emulation_utils

    weight = torch.randn(64, 256)
    for name in ("nvfp4", "mxfp8"):
        scheme = scheme_of(name)
        stored = compressed_weight(weight, scheme)
        if name == "mxfp8":
            theirs = mxfp8_utils.dequant_mxfp8_to_bf16(stored["weight"], stored["weight_scale"])
        else:
            theirs = nvfp4_emulation_utils.dequantize_to_dtype(
                stored["weight_packed"],
                stored["weight_scale"],
                1 / stored["weight_global_scale"].max(),  # as CompressedTensorsW4A4Fp4 makes it
                torch.bfloat16,
                swizzle=False,
            )
        assert torch.equal(theirs.float(), fake_quantize_weight(weight, scheme.weights))


def test_queries_and_keys_are_rounded_once():
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 9, 64).bfloat16(), torch.randn(2, 2, 9, 64).bfloat16()
    angles = torch.outer(torch.arange(9.0), 10000.0 ** (-torch.arange(0, 64, 2) / 64))
    plain = [value.bfloat16().double() for value in (angles.cos(), angles.sin())]
    cos, sin = _with_late_rounding(
        lambda: True, None, None, tuple(torch.cat([value.bfloat16()] * 2, -1)[None] for value in plain)
    )
    for mine, value in zip(apply_rotary_pos_emb(query, key, cos, sin), (query, key), strict=True):
        first, second = value.double().chunk(2, -1)
        expected = torch.cat([first * plain[0] - second * plain[1], second * plain[0] + first * plain[1]], -1)
        assert type(mine) is torch.Tensor
        assert torch.equal(mine, expected.bfloat16())


def test_norms_read_the_sum_before_it_is_rounded():
    replica = Replica(make_model(128), "bf16")
    seen, layer = {}, replica.model.model.layers[1]
    layer.register_forward_pre_hook(lambda module, inputs: seen.update(before=inputs[0]))
    layer.self_attn.register_forward_hook(lambda module, inputs, output: seen.update(added=output[0]))
    layer.post_attention_layernorm.register_forward_hook(lambda module, inputs, output: seen.update(norm=output))

    def share_that_differs(total):
        expected = (total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt()).bfloat16()
        return (seen["norm"] != expected * layer.post_attention_layernorm.weight).float().mean()

    for prompt in PROMPTS:
        with torch.no_grad():
            replica.model(torch.tensor([prompt]))
        total = seen["before"].double() + seen["added"].double()
        assert share_that_differs(total) < 0.01
        assert share_that_differs(total.bfloat16().double()) > 0.02


def test_rounding_to_float8_is_bit_for_bit_the_cast():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].unique()
    ties = (codes[1:] + codes[:-1]) / 2
    around = torch.cat([ties.nextafter(torch.tensor(side)) for side in (-torch.inf, torch.inf)])
    values = torch.cat([codes, ties, around]).clamp(-448, 448)
    assert torch.equal(round_to_float8(values.clone()), values.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_quantized_and_what_is_not(scheme):
    policy = make_model(128)
    replica = Replica(policy, scheme)
    layers = {name: layer for name, layer in replica.model.named_modules() if hasattr(layer, "weight_scale")}
    for name, weight in policy.named_parameters():
        mine = replica.model.get_parameter(name)
        layer = layers.get(name.removesuffix(".weight"))
        if layer is not None:
            assert torch.equal(mine, mine.bfloat16()), "numbers of the format, which bfloat16 holds"
            torch.testing.assert_close(mine * layer.weight_scale[:, None], by_hand(weight.detach(), scheme))
            continue
        assert mine.dtype == torch.bfloat16
        untouched = scheme == "bf16" or weight.ndim == 1 or "embed" in name
        assert torch.equal(mine, weight.bfloat16()) == untouched, name
    assert replica.model.lm_head.weight is replica.model.model.embed_tokens.weight
    assert len(layers) == (14 if scheme in ("fp8", "int8") else 0)
    hooked = {m for m in replica.model.modules() if isinstance(m, torch.nn.Linear) and m._forward_pre_hooks}
    assert len(hooked - {replica.model.lm_head}) == (14 if scheme in ("fp8_block", "nvfp4", "mxfp8") else 0)


@pytest.mark.parametrize("scheme", ["bf16", "fp8"])
def test_the_output_head_is_not_copied_for_each_row(scheme):
    replica = Replica(make_tall_model(), scheme)
    largest = largest_allocation(lambda: replica.generate([[20, 30, 40]] * 32, sampling(max_new_tokens=2), 1.0))
    scores = 32 * 50_000 * 4  # in float32
    assert scores <= largest < 2 * scores  # 32 heads in bfloat16 are 32 times that


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "int4"])
def test_log_probabilities_are_the_replicas(scheme):
    temperature = 0.7
    torch.manual_seed(0)
    replica = Replica(make_model(128), scheme)
    replica.model.float()  # so that decoding with a cache and one forward pass agree closely
    prompts = PROMPTS * 8
    read = []
    replica.model.get_input_embeddings().register_forward_hook(lambda module, ids, states: read.append(ids[0].shape))
    completions, logprobs = replica.generate(prompts, sampling(temperature=temperature), temperature)
    assert read[:2] == [(3, 4), (24, 1)]  # each prompt once, and the last token of each row
    gaps = sorted(
        (torch.tensor(values) - plain_logps(replica.model, prompt, ids, temperature)).abs().amax().item()
        for prompt, ids, values in zip(prompts, completions, logprobs, strict=True)
    )
    # A difference in the last bit can tip a quantized activation into the next code, in some of the completions.
    assert gaps[len(gaps) // 2] < 1e-4
    assert gaps[-1] < (0.5 if scheme == "fp8" else 1e-4)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_cache_that_a_configuration_names_is_used(kind):
    """Also for several completions of a prompt, which `generate` reads by itself then."""
    replica, prompts = Replica(make_model(128), "bf16"), [[20, 30, 40]] * 2
    ours, named = (sampling(do_sample=False, cache_implementation=each) for each in (None, kind))
    assert replica.generate(prompts, named, 1.0)[0] == replica.generate(prompts, ours, 1.0)[0]


def test_samples_follow_the_replicas_distribution():
    torch.manual_seed(0)
    replica = Replica(make_model(128), "fp8")
    with torch.no_grad():
        expected = (replica.model(input_ids=torch.tensor([[20, 30]])).logits[0, -1].float() / 0.8).softmax(-1)
    completions, _ = replica.generate([[20, 30]] * 4000, sampling(max_new_tokens=1, temperature=0.8), 0.8)
    counts = torch.bincount(torch.tensor(completions).flatten(), minlength=262) / 4000
    common = expected > 0.02
    assert common.sum() >= 5
    # Four standard errors of a frequency.
    tolerance = 4 * (expected * (1 - expected) / 4000).sqrt()
    assert ((counts - expected).abs() < tolerance)[common].all()


def test_completions_end_with_their_first_end_token():
    torch.manual_seed(0)
    replica = Replica(make_model(128), "bf16")
    ends = {1, 40, 41}
    completions, logprobs = replica.generate([[20]] * 64, sampling(max_new_tokens=30, eos_token_id=[*ends]), 1.0)
    assert min(map(len, completions)) < 30
    for completion, values in zip(completions, logprobs, strict=True):
        assert len(completion) == len(values)
        assert not ends & set(completion[:-1])
        assert len(completion) == 30 or completion[-1] in ends


@pytest.mark.parametrize(
    ("make", "scheme"), [(lambda seed: make_model(128, seed), "int4"), (lambda seed: make_experts(64, seed), "fp8")]
)
def test_follows_the_policy(make, scheme):
    policy, other = make(0), make(1)
    replica = Replica(policy, scheme)
    policy.load_state_dict(other.state_dict())
    replica.sync(policy)
    fresh = Replica(other, scheme)
    assert_same_weights(replica.model, fresh.model)


LINEAR = {"target_modules": ["q_proj", "down_proj"]}
OF_EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        *((make_model, LINEAR | options) for options in ({}, {"use_dora": True}, {"modules_to_save": ["norm"]})),
        (make_experts, OF_EXPERTS),
    ],
)
def test_adapters_are_merged_outside_the_policy(make, options):
    base = make(128)
    policy = get_peft_model(copy.deepcopy(base), LoraConfig(r=4, task_type="CAUSAL_LM", **options))
    torch.manual_seed(1)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    before = copy.deepcopy(policy.state_dict())
    merged = dict(policy_tensors(policy))
    assert_same_tensors(policy.state_dict(), before)
    reference = copy.deepcopy(policy).merge_and_unload()
    expected = dict(reference.named_parameters(remove_duplicate=False))
    assert set(expected) <= set(merged)
    adapted = tuple(name for names in options.values() if names is not True for name in names)
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor)
        moved = not torch.equal(merged[name], base.get_parameter(name))
        assert moved == name.removesuffix(".weight").endswith(adapted), name
    Replica(policy, "fp8")


def test_an_adapter_without_merged_form_is_refused():
    policy = get_peft_model(make_model(128), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with refuses(ValueError, "peft_config", "LoRA"):
        Replica(policy, "bf16")


def test_groups_follow_the_width_of_the_model(caplog):
    for width, size in ((128, 128), (32, 32), (160, 32)):
        assert resolve_scheme("int4", make_model(width)).weights.group_size == size
    assert all(words in caplog.text for words in ("'int4_g32'", "160", "model.layers.0"))
    assert "128 inputs" not in caplog.text
    with refuses(ValueError, "deployment_scheme='int4'", 48, "'fp8'", "'int8'"):
        resolve_scheme("int4", make_model(48))
    with refuses(ValueError, "deployment_scheme='fp8_block'", 128, "'fp8'"):
        Replica(make_model(32), "fp8_block")
    with refuses(ValueError, "deployment_scheme='fp4'", "'bf16'"):
        Replica(make_model(), "fp4")


@quantized
def test_experts_by_hand(scheme):
    policy = make_experts(256)
    replica = Replica(policy, scheme)
    quantized = 0
    for name, weight in policy.named_parameters():
        mine = replica.model.get_parameter(name)
        quantized += weight.numel() * (mine.dtype == torch.float32 or not torch.equal(mine, weight.bfloat16()))
        if "experts" in name:
            for expert, of in zip(mine, weight.detach(), strict=True):
                # Gates and ups lie one under the other; they are two matrices, of 256 rows each.
                parts = [by_hand(part, scheme) for part in of.split(256)]
                torch.testing.assert_close(expert, torch.cat(parts).bfloat16())
        elif name.endswith("mlp.gate.weight") or "embed" in name or "lm_head" in name or weight.ndim == 1:
            assert torch.equal(mine, weight.bfloat16()), name
    assert quantized > 0.9 * policy.num_parameters()


def test_experts_read_quantized_activations_and_their_router_does_not():
    def round_trip(value):
        scale = value.abs().max() / 448
        return (value / scale).to(torch.float8_e4m3fn).float() * scale

    policy = make_experts(64)
    replica = Replica(policy, "fp8")
    replica.model.float()  # leaves quantization as the only rounding
    block = replica.model.model.layers[0].mlp
    tokens = torch.randn(1, 12, 64)
    expected = []
    for token in tokens[0]:
        probabilities, chosen = (block.gate.weight @ token).softmax(-1).topk(2)
        output = torch.zeros(64)
        for weight, expert in zip(probabilities / probabilities.sum(), chosen, strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ round_trip(token)).chunk(2)
            hidden = round_trip(torch.nn.functional.silu(gate) * up)
            output += weight * (block.experts.down_proj[expert] @ hidden)
        expected.append(output)
    with torch.no_grad():
        mine = block(tokens)[0]
    expected = torch.stack(expected)
    # A difference in the last bit can tip an activation into the next code, in some of the tokens.
    gaps = ((mine - expected).norm(dim=1) / expected.norm(dim=1)).sort().values
    assert gaps[6] < 1e-5
    assert gaps[-1] < 2e-2
    unquantized = policy.float().model.layers[0].mlp(tokens)[0]
    assert ((mine - unquantized).norm(dim=1) / unquantized.norm(dim=1)).min() > 1e-3


def test_experts_in_an_unknown_layout_are_refused_where_they_would_stay_unquantized():
    policy = random_model(GptOssConfig, head_dim=32, **TWO_EXPERTS)
    Replica(policy, "bf16").generate(PROMPTS, sampling(), 1.0)
    with refuses(ValueError, "deployment_scheme='fp8'", "model.layers", "GptOssExperts", "='bf16'"):
        Replica(policy, "fp8")
    with refuses(ValueError, "deployment_scheme='int4'", 48, "'fp8'"):
        Replica(make_experts(48), "int4")


def test_a_model_in_which_nothing_would_be_quantized_is_refused():
    """GPT-2's layers are transformers' own Conv1D: a policy in BF16 would be sampled and shipped by another name."""
    policy = random_model(GPT2Config)
    Replica(policy, "bf16")
    with refuses(ValueError, "deployment_scheme='fp8'", "GPT2LMHeadModel", "'bf16'"):
        CheckpointWriter(policy, "fp8")


LINEAR_ATTENTION = {
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "linear_attention"],
    "num_local_experts": 4,
}
MIXED = {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "moe_intermediate_size": 64}


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(("config", "options"), [(MiniMaxConfig, LINEAR_ATTENTION), (Ernie4_5_MoeConfig, MIXED)])
def test_dtypes_are_those_in_which_transformers_loads_a_model(tmp_path, config, options, aligned):
    """Buffers that follow the model's dtype, and parameters that stay in float32, also where the master's are float32.

    MiniMax scales its residual stream, by factors that are whole numbers here.
    """
    torch.manual_seed(0)
    policy = random_model(config, head_dim=32, initializer_range=0.2, **options).eval()
    policy.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ids = torch.arange(20, 40).view(2, 10)
    if aligned:
        forward = DeployedForward(policy, "bf16")
        with forward.active():
            logits = policy(input_ids=ids).logits
        masters = [*policy.parameters(), *policy.buffers()]
        assert {each.dtype for each in masters} == {torch.float32}  # and they are back
    else:
        replica = Replica(policy, "bf16").model
        dtypes, own = ({n: t.dtype for n, t in model.state_dict().items()} for model in (theirs, replica))
        assert own == dtypes
        logits = replica(input_ids=ids).logits
    torch.testing.assert_close(logits.float(), theirs(input_ids=ids).logits.float(), atol=0.2, rtol=0.05)


@pytest.mark.parametrize(
    ("config", "options", "block"),
    [
        (Qwen3Config, {}, 2 * 4 * 9 * 9),  # some rows at a time
        (Gemma2Config, {"attn_logit_softcapping": 0.5, "sliding_window": 4}, 4 * 4 * 9),  # some queries at a time
        (GptOssConfig, {**TWO_EXPERTS, "sliding_window": 4}, attention._BLOCK),
    ],
)
def test_attention_is_the_models_own(config, options, block, monkeypatch):
    monkeypatch.setattr(attention, "_BLOCK", block)
    torch.manual_seed(0)
    # With larger weights the rounding of float32 grows beyond the tolerance, on some machines.
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "head_dim": 16}
    model = random_model(config, num_hidden_layers=2, bos_token_id=None, eos_token_id=1, **heads, **options).eval()
    input_ids = torch.randint(2, 262, (3, 9))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :4] = 0
    logits = []
    for implementation in ("eager", attention.NAME):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits.append(model(input_ids=input_ids, attention_mask=attention_mask).logits[attention_mask == 1])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_tiles", [False, True])
@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("from_fp8_cache", [False, True])
def test_attention_rounds_the_weights_that_vllm_rounds(in_tiles, width, from_fp8_cache, monkeypatch):
    """Beside one query after the other by hand: with AMX vLLM rounds exp(score - largest) for the product alone."""
    monkeypatch.setattr(attention, "_HAS_TILES", in_tiles)
    torch.manual_seed(0)
    # Values are narrower than keys, as in DeepSeek's latent attention.
    query, key, value = (
        torch.randn(2, *shape).bfloat16().requires_grad_()
        for shape in ((4, 5, width), (2, 5, width), (2, 5, width // 2))
    )
    mask = torch.full((5, 5), -torch.inf).triu(1).expand(2, 1, 5, 5)
    upstream = torch.randn(2, 5, 4, width // 2)
    name = attention.with_fp8_cache(attention.NAME) if from_fp8_cache else attention.NAME
    attend = ALL_ATTENTION_FUNCTIONS[name]
    output, _ = attend(nn.Module(), query, key, value, mask, scaling=2.0)
    if from_fp8_cache:
        key, value = map(attention.in_fp8_cache, (key, value))
    output.backward(upstream.bfloat16())
    expected, by_query = torch.empty(upstream.shape), torch.empty(query.shape)
    for batch, head, place in itertools.product(range(2), range(4), range(5)):
        keys, values = (x.detach()[batch, head // 2, : place + 1].double() for x in (key, value))
        scores = 2.0 * keys @ query.detach()[batch, head, place].double()
        powers = (scores - scores.max()).exp()
        rounded = powers.bfloat16().double() if in_tiles and width == 32 and not from_fp8_cache else powers
        row = rounded @ values / powers.sum()
        gradient = upstream.bfloat16()[batch, place, head].double()
        expected[batch, place, head] = row
        by_query[batch, head, place] = 2.0 * (powers / powers.sum() * (values @ gradient - row @ gradient)) @ keys
    assert torch.equal(output, expected.bfloat16())
    torch.testing.assert_close(query.grad, by_query.bfloat16(), rtol=1e-2, atol=1e-2)
