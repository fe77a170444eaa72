"""What each of two ranks of vLLM holds of a checkpoint: its share of the weights, rounded as the format is defined."""

import sys

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from torch.nn.functional import pad

from dc_trl.quantization.checkpoint import CheckpointWriter
from dc_trl.quantization.schemes import SCHEMES
from dc_trl.quantization.tensors import policy_tensors

from .helpers import make_experts, make_model, make_tokenizer, succeed
from .test_replica import by_hand
from .test_stored import published_weights
from .vllm_server import requires_vllm


pytestmark = [requires_vllm, pytest.mark.long, pytest.mark.timeout(900)]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}  # the mixture has one head of keys
MODELS = {
    "dense": lambda: make_model(256, tie_word_embeddings=False, **HEADS),
    "experts": lambda: make_experts(256),
}
CASES = [(kind, scheme) for kind in MODELS for scheme in SCHEMES if f"{kind} {scheme}" != "experts fp8_w8a16"]
GATE_AND_UP = ["gate_proj", "up_proj"]
# Matrices that lie below each other in one of vLLM's layers.
FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": GATE_AND_UP,
    "w13": GATE_AND_UP,
    "w2": ["down_proj"],
}
VOCABULARY = 320  # rows, as vLLM pads it


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """What a rank holds of a model in a scheme, by layer and by name in the layer."""
    parent = tmp_path_factory.mktemp("ranks")
    folders = {case: parent / "-".join(case) for case in CASES}
    for (kind, scheme), folder in folders.items():
        model = MODELS[kind]()
        CheckpointWriter(model, scheme, make_tokenizer()).write(policy_tensors(model), folder)
    succeed([sys.executable, "-m", "tests.tensor_parallel_worker", *map(str, folders.values())])

    def of(case, rank):
        found = {}
        for name, tensor in torch.load(folders[case] / f"rank{rank}.pt").items():
            layer, _, part = name.rpartition(".")
            if layer.endswith(".routed_experts"):
                matrix, _, part = part.partition("_")
                for expert, each in enumerate(tensor):
                    one = f"{layer.removesuffix('routed_experts')}{expert}.{matrix}"
                    found.setdefault(one, {})[part] = each
            else:
                found.setdefault(layer, {})[part] = tensor
        return found

    return of


def share(matrix, weight, rank, key_heads):
    """The part of a matrix that belongs to a rank."""
    if matrix in ("o_proj", "down_proj"):
        return weight.chunk(2, 1)[rank]
    if matrix in ("embed_tokens", "lm_head"):
        return pad(weight, (0, 0, 0, VOCABULARY - len(weight))).chunk(2)[rank]
    cut = {"q_proj", *GATE_AND_UP} | ({"k_proj", "v_proj"} if key_heads == 2 else set())
    return weight.chunk(2)[rank] if matrix in cut else weight


def decoded(layer, number, begin, end):
    """The numbers of one matrix of a layer, between two of its rows: each times the scale of its block."""
    weight, scale = layer.get("weight", layer.get("weight_packed")), layer["weight_scale"]
    scale = scale[begin * len(scale) // len(weight) : end * len(scale) // len(weight)]  # a block may have many rows
    weight = weight[begin:end]
    if weight.dtype == torch.int32:
        weight = unpack_from_int32(weight, 4, (end - begin, 8 * weight.shape[1]))
    elif weight.dtype == torch.uint8:
        weight = unpack_fp4_from_uint8(weight, end - begin, 2 * weight.shape[1])
        scale = scale.float() / layer["weight_global_scale"].reshape(-1)[number]  # one for each matrix
    elif scale.dtype == torch.uint8:
        scale = torch.exp2(scale.float() - 127)
    for axis in range(2):
        scale = scale.repeat_interleave(weight.shape[axis] // scale.shape[axis], axis)
    return weight.float() * scale


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_rank_holds_its_share_of_the_weights(layers, case):
    kind, scheme = case
    model = MODELS[kind]()
    for rank in range(2):
        weights = published_weights(model)
        for name, layer in layers(case, rank).items():
            before, _, last = name.rpartition(".")
            end = 0
            for number, matrix in enumerate(FUSED.get(last, [last])):
                weight = weights.pop(f"{before}.{matrix}.weight".removeprefix("."))
                quantized = matrix.endswith("proj") and scheme != "bf16"
                rounded = by_hand(weight, scheme) if quantized else weight.bfloat16().float()
                expected = share(matrix, rounded, rank, model.config.num_key_value_heads)
                begin, end = end, end + len(expected)
                found = decoded(layer, number, begin, end) if quantized else layer["weight"][begin:end].float()
                assert torch.equal(found, expected), (name, matrix, rank)
            assert end == len(layer.get("weight", layer.get("weight_packed"))), name
        assert not weights
