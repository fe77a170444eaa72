"""An adapter beside its quantized base (`lora_deployment="adapter"`): replica, aligned forward, server, files."""

import json
import shlex
import shutil
import subprocess
import sys

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dc_trl import DCGRPOTrainer
from dc_trl.hub.push import run_files
from dc_trl.quantization.adapter import beside_base, require_adapter_beside
from dc_trl.quantization.contract import broken_terms, read_contract, read_tensors
from dc_trl.quantization.deployed_forward import DeployedForward
from dc_trl.rollouts.replica import Replica
from dc_trl.settings.paths import serve_line

from .helpers import TINY_MODEL, distinct_characters, logged, make_config, make_model, make_prompts, make_tokenizer
from .vllm_server import requires_vllm, serving


IDS = torch.arange(3, 67).view(2, 32)
LORA = {"r": 8, "lora_alpha": 12, "lora_dropout": 0.0, "target_modules": ["q_proj", "o_proj", "down_proj"]}


def adapted(base=None, **options):
    torch.manual_seed(1)
    config = LoraConfig(**{"init_lora_weights": False} | LORA | options)
    return get_peft_model(make_model(64) if base is None else base, config)


def make_trainer(folder, policy=None, **fields):
    settings = {"deployment_scheme": "int4_g32", "lora_deployment": "adapter", "max_steps": 3, "export_run": True}
    return DCGRPOTrainer(
        adapted() if policy is None else policy,
        distinct_characters,
        make_config(folder, **settings | fields),
        train_dataset=make_prompts(),
        processing_class=make_tokenizer(),
    )


def probabilities(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits.float().softmax(-1)


def gap(one, other):
    return (one - other).abs().sum(-1).mean().item() / 2


def test_the_product_is_vllms():
    """vLLM's own operators on a CPU, with the scale merged into B as its loader does."""
    ops = pytest.importorskip("vllm.lora.ops.torch_ops.lora_ops")
    generator = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(*shape, generator=generator) for shape in ((5, 64), (8, 64), (32, 8)))
    x, indices, output = x.bfloat16(), torch.zeros(5, dtype=torch.long), torch.zeros(5, 32, dtype=torch.bfloat16)
    low = torch.zeros(5, 8)
    ops.bgmv_shrink(x, a.bfloat16()[None], low, indices, 1.0)
    ops.bgmv_expand(low, (b.bfloat16() * 1.5)[None], output, indices, True)
    torch.testing.assert_close(beside_base(x, a, b, 1.5), output, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("scheme", ["int4_g32", "fp8", "mxfp8"])
def test_the_replica_adds_the_adapter_to_the_quantized_base(scheme):
    """PEFT's own forward on the quantized weights, where activations stay; a nearer policy than base and merged."""
    policy = adapted()
    beside = probabilities(Replica(policy, scheme, lora_deployment="adapter").model)
    merged = probabilities(Replica(policy, scheme).model)
    with policy.disable_adapter():
        base = Replica(policy.get_base_model(), scheme) if scheme == "never" else None
    assert base is None
    if scheme == "int4_g32":
        quantized = make_model(64)
        values = Replica(quantized, scheme).model.state_dict()
        quantized.load_state_dict({name: value.float() for name, value in values.items()})
        expected = probabilities(adapted(quantized))
        assert gap(beside, expected) < 0.2 * gap(merged, expected)
    # The same numbers with the policy's own modules, bit for bit.
    with DeployedForward(policy, scheme, lora_deployment="adapter").active():
        assert torch.equal(probabilities(policy), beside)
