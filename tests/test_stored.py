"""The bytes of a checkpoint, which are those of compressed-tensors and safetensors."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationStrategy
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from dc_trl.quantization.fake_quantize import compressed_weight
from dc_trl.quantization.schemes import SCHEMES, fused_experts, resolve_scheme

from .helpers import (
    make_experts,
    make_model,
    write_checkpoint,
)


def whole(weight: torch.Tensor, scheme) -> dict[str, torch.Tensor]:
    """What compressed-tensors makes of a weight as a whole."""
    args, values = scheme.weights, weight.float()
    if args.strategy == QuantizationStrategy.BLOCK:
        rows, columns = (-(-size // 128) * 128 for size in weight.shape)
        padded = torch.zeros(rows, columns)
        padded[: weight.shape[0], : weight.shape[1]] = values
        blocks = padded.view(rows // 128, 128, columns // 128, 128)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        blocks = values.view(weight.shape[0], -1, args.group_size or weight.shape[1])
        low, high = blocks.amin(-1), blocks.amax(-1)
    state = {"weight": values}
    if args.strategy == QuantizationStrategy.TENSOR_GROUP:
        state["weight_global_scale"] = torch.tensor([64.0])
        if scheme.input_activations is not None:
            state["input_global_scale"] = torch.tensor([0.5])
    scale, zero_point = calculate_qparams(low, high, args, state.get("weight_global_scale"))
    if args.strategy == QuantizationStrategy.GROUP:
        scale = scale.to(torch.bfloat16).float()
    state |= {"weight_scale": scale, "weight_zero_point": zero_point}
    with torch.compiler.set_stance("force_eager"):  # compiling the rounding to FP4 takes a minute
        return BaseCompressor.get_value_from_registry(scheme.format.value).compress(state, scheme)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def published_weights(model) -> dict[str, torch.Tensor]:
    """The weights of a model by the names of its checkpoints, with those of experts named by hand."""
    weights = dict(model.state_dict())
    for name in [name for name in weights if "experts.gate_up_proj" in name]:
        layer = name.removesuffix("gate_up_proj")
        for number, (both, down) in enumerate(zip(weights.pop(name), weights.pop(f"{layer}down_proj"), strict=True)):
            gate, up = both.chunk(2)
            parts = {"gate": gate, "up": up, "down": down}
            weights |= {f"{layer}{number}.{key}_proj.weight": value for key, value in parts.items()}
    return weights


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "bf16"])
def test_a_weight_with_special_numbers_is_what_compressed_tensors_makes_of_it(scheme):
    """Rows of zeros, zeros of both signs, subnormal numbers, the largest ones; blocks that stand out of the weight."""
    weight = torch.randn(300, 384) * torch.rand(300, 1) ** 20
    weight[::7] = 0.0
    weight[3, :11] = torch.tensor([-0.0, 1e-45, -1e-42, 3e-39, -1e-38, 5e-36, 1e-20, -1e-12, 448.0, 3e38, -3.4e38])
    resolved = resolve_scheme(scheme, make_model(256))
    expected, found = whole(weight, resolved), compressed_weight(weight, resolved)
    assert found.keys() == expected.keys()
    assert all(same_bytes(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("make", [lambda: make_model(256), lambda: make_experts(128)], ids=["dense", "experts"])
def test_a_checkpoint_is_what_the_libraries_write_from_the_whole(tmp_path, scheme, make):
    """compressed-tensors quantizes whole weights, transformers names them, safetensors writes them from memory."""
    model = make()
    if scheme == "fp8_w8a16" and fused_experts(model):
        pytest.skip("vLLM loads no mixture in it, so it is refused")
    write_checkpoint(model, scheme, tmp_path / "ours")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "published")
    names = load_file(tmp_path / "published" / "model.safetensors").keys()
    weights, resolved = published_weights(make()), resolve_scheme(scheme, make())
    expected = {}
    for name in names:
        if scheme != "bf16" and name.endswith("proj.weight"):
            layer = name.removesuffix("weight")
            expected |= {layer + part: value.contiguous() for part, value in whole(weights[name], resolved).items()}
        else:
            expected[name] = weights[name].to(torch.bfloat16)
    save_file(expected, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()
