"""The bytes of a checkpoint, which are those of compressed-tensors and safetensors; and files that stay."""

import errno
import os
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationStrategy
from compressed_tensors.quantization.utils import calculate_qparams
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from dc_trl.quantization.checkpoint import CheckpointWriter
from dc_trl.quantization.fake_quantize import compressed_weight
from dc_trl.quantization.schemes import SCHEMES, resolve_scheme
from dc_trl.quantization.tensors import frozen_tensors, policy_tensors

from .helpers import make_experts, make_model, make_tokenizer, tensors_in


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
    scale, zero_point = calculate_qparams(low, high, args)
    if args.strategy == QuantizationStrategy.GROUP:
        scale = scale.to(torch.bfloat16).float()
    state = {"weight": values, "weight_scale": scale, "weight_zero_point": zero_point}
    return BaseCompressor.get_value_from_registry(scheme.format.value).compress(state, scheme)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "bf16"])
def test_a_weight_with_special_numbers_is_what_compressed_tensors_makes_of_it(scheme, monkeypatch):
    """Rows of zeros, zeros of both signs, subnormal numbers, the largest ones; blocks that stand out of the weight."""
    monkeypatch.setattr("dc_trl.quantization.fake_quantize._PIECE", 2**16)  # in several pieces
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
    CheckpointWriter(model, scheme, make_tokenizer()).write(policy_tensors(model), tmp_path / "ours")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "published")
    names = load_file(tmp_path / "published" / "model.safetensors").keys()
    weights = dict(make().state_dict())
    for name in [name for name in weights if "experts.gate_up_proj" in name]:  # by hand, as the names are published
        layer = name.removesuffix("gate_up_proj")
        for number, (both, down) in enumerate(zip(weights.pop(name), weights.pop(f"{layer}down_proj"), strict=True)):
            gate, up = both.chunk(2)
            parts = {"gate": gate, "up": up, "down": down}
            weights |= {f"{layer}{number}.{key}_proj.weight": value for key, value in parts.items()}
    resolved = resolve_scheme(scheme, make())
    expected = {}
    for name in names:
        if scheme != "bf16" and name.endswith("proj.weight"):
            layer = name.removesuffix("weight")
            expected |= {layer + part: value.contiguous() for part, value in whole(weights[name], resolved).items()}
        else:
            expected[name] = weights[name].to(torch.bfloat16)
    save_file(expected, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


# --- frozen weights --------------------------------------------------------------------------------------------------


def adapted(**options):
    policy = get_peft_model(make_model(64), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **options))
    return move(policy, 1)


@torch.no_grad()
def move(policy, seed: int):
    """A training step."""
    torch.manual_seed(seed)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return policy


class Folder:
    """Checkpoints of a policy, one after the other, as weights go to an engine."""

    def __init__(self, path: Path, policy, scheme: str = "fp8", **options):
        self.policy, self.path = policy, path
        self.writer = CheckpointWriter(policy, scheme, make_tokenizer(), **options)
        self.reference = CheckpointWriter(policy, scheme, make_tokenizer())

    def write(self, name: str) -> Path:
        frozen = frozen_tensors(Accelerator(cpu=True), self.policy)
        size = self.writer.write(policy_tensors(self.policy), self.path / name, frozen, self.path / ".frozen")
        assert size == sum(file.stat().st_size for file in (self.path / name).iterdir())
        assert size == self.writer.cost.bytes_written + self.writer.cost.bytes_reused
        return self.path / name

    def assert_whole(self, checkpoint: Path) -> None:
        """Its tensors are those of a checkpoint that is written at once."""
        self.reference.write(policy_tensors(self.policy), self.path / "reference")
        expected = load_file(self.path / "reference" / "model.safetensors")
        found = tensors_in(checkpoint)
        assert found.keys() == expected.keys()
        assert all(same_bytes(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("scheme", "options"), [("bf16", {}), ("fp8", {"modules_to_save": ["norm"]}), ("int4", {})])
def test_what_an_adapter_leaves_alone_is_written_once(tmp_path, scheme, options):
    folder = Folder(tmp_path, adapted(**options), scheme)
    first = folder.write("first")
    folder.assert_whole(first)
    assert folder.writer.cost.bytes_reused == 0
    before = {file.name: file.read_bytes() for file in first.iterdir()}
    move(folder.policy, 2)
    second = folder.write("second")
    folder.assert_whole(second)
    changing, frozen = sorted(second.glob("*.safetensors"))
    assert os.path.samefile(frozen, first / frozen.name)
    assert folder.writer.cost.bytes_reused == frozen.stat().st_size > 0
    # Only layers that are adapted, or trained whole, are written again.
    trained = ("q_proj", "down_proj", *options.get("modules_to_save", ()))
    assert all(any(key in name for key in trained) for name in load_file(changing))
    assert not any(any(f".{key}." in name for key in trained) for name in load_file(frozen))
    assert {file.name: file.read_bytes() for file in first.iterdir()} == before  # a reader of the first goes on


def test_frozen_files_outlive_the_checkpoints(tmp_path):
    folder = Folder(tmp_path, adapted(), max_shard_bytes=20_000)
    first = folder.write("first")
    for file in first.iterdir():
        file.unlink()
    first.rmdir()
    move(folder.policy, 2)
    folder.assert_whole(folder.write("second"))
    assert folder.writer.cost.bytes_reused > 20_000


def test_a_frozen_weight_that_somebody_writes_is_written(tmp_path):
    folder = Folder(tmp_path, adapted())
    folder.write("first")
    base = folder.policy.get_base_model()
    with torch.no_grad():
        base.get_input_embeddings().weight.mul_(2)  # in place
    folder.assert_whole(folder.write("second"))
    assert folder.writer.cost.bytes_reused == 0
    base.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.randn(128, 64), requires_grad=False)  # replaced
    folder.assert_whole(folder.write("third"))
    assert folder.writer.cost.bytes_reused == 0
    base.model.layers[1].mlp.up_proj.weight.requires_grad_(True)  # trained from now on
    folder.assert_whole(folder.write("fourth"))
    move(folder.policy, 3)
    folder.assert_whole(folder.write("fifth"))
    assert folder.writer.cost.bytes_reused > 0
    for parameter in base.parameters():
        parameter.requires_grad_(True)
    folder.policy.get_base_model().model.layers[1].mlp.up_proj.weight.data.mul_(2)
    folder.assert_whole(folder.write("sixth"))


def test_a_policy_that_is_trained_whole_leaves_nothing_behind(tmp_path):
    folder = Folder(tmp_path, make_model(64))
    folder.assert_whole(folder.write("first"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "reference"]
    assert folder.writer.cost.bytes_reused == 0


def test_without_hard_links_all_is_written_each_time(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")  # what exFAT and some network file systems say

    folder = Folder(tmp_path, adapted())
    monkeypatch.setattr(os, "link", refuse)
    folder.write("first")
    move(folder.policy, 2)
    folder.assert_whole(folder.write("second"))
    assert folder.writer.cost.bytes_reused == 0


def test_a_write_that_failed_leaves_frozen_files_as_they_were(tmp_path):
    folder = Folder(tmp_path, adapted())
    folder.write("first")
    stamps = frozen_tensors(Accelerator(cpu=True), folder.policy)
    half = [item for number, item in enumerate(policy_tensors(folder.policy)) if number < 9]
    with pytest.raises(KeyError):
        folder.writer.write(half, tmp_path / "second", stamps, tmp_path / ".frozen")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".frozen", "first"]
    folder.assert_whole(folder.write("third"))
    assert folder.writer.cost.bytes_reused > 0
