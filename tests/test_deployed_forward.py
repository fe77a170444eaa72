"""The aligned forward against the replica's own samples, and its gradients against models written by hand."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig, GraniteConfig, OPTConfig
from trl.trainer.utils import add_fused_lm_head

from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.quantization import attention
from dc_trl.quantization.deployed_forward import DeployedForward
from dc_trl.quantization.rounding import round_as_vllm
from dc_trl.quantization.tensors import policy_tensors
from dc_trl.sampling.replica import Replica

from .helpers import make_experts, make_model, make_tokenizer, random_model, refuses, tiny_model
from .test_replica import PROMPTS, by_hand


SCHEMES = ["fp8", "int8", "int4"]  # tests/test_train_through_quantization.py has the others


def sampled(policy, scheme, prompts, new_tokens=40):
    """A batch of the replica's samples as TRL lays it out, their log-probabilities, and which of these to count."""
    sampling = GenerationConfig(max_new_tokens=new_tokens, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=[1])
    completions, logprobs = Replica(policy, scheme).generate(prompts, sampling, 1.0)
    width, height = max(map(len, prompts)), max(map(len, completions))
    input_ids = torch.zeros(len(prompts), width + height, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    infer_logps = torch.zeros(len(prompts), height)
    for row, (prompt, completion, values) in enumerate(zip(prompts, completions, logprobs, strict=True)):
        span = slice(width - len(prompt), width + len(completion))
        input_ids[row, span] = torch.tensor(prompt + completion)
        attention_mask[row, span] = 1
        infer_logps[row, : len(values)] = torch.tensor(values)
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :width] = -100
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    return batch, infer_logps, labels[:, width:] != -100


def logps(policy, batch, tokens):
    return policy(**batch, fused_lm_head=True).log_probs[:, -tokens:]


def mean_gap(policy, batch, infer_logps, counted):
    with torch.no_grad():
        train_logps = logps(policy, batch, infer_logps.shape[1])
    return (train_logps.exp() - infer_logps.exp()).abs()[counted].mean().item()


def gradients(policy, batch):
    """Of the mean log-probability, by parameter."""
    policy.zero_grad()
    logps(policy, batch, 8).mean().backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def assert_same(ours, theirs, tolerance=0.0):
    """Gradients are equal, to a share of each one's norm."""
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert ours[name].isfinite().all()
        assert (ours[name].float() - gradient.float()).norm() <= tolerance * gradient.float().norm(), name


def small_batch():
    torch.manual_seed(3)
    input_ids = torch.randint(2, 262, (3, 14))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, :4] = 0
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :6] = -100
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def test_keys_and_values_are_cut_to_the_nearest_number_of_e4m3_towards_zero():
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 to 448, rising
    values = (torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 40).bfloat16()
    values = torch.cat(
        [values, values / 2**12, numbers.bfloat16(), -numbers.bfloat16(), torch.tensor([1e4, -1e4]).bfloat16()]
    )
    expected = numbers[torch.searchsorted(numbers, values.float().abs(), right=True) - 1] * values.float().sign()
    assert torch.equal(attention.in_fp8_cache(values).float(), expected)


@pytest.mark.parametrize("name", ["eager", "flash_attention_2"])
def test_an_attention_that_cannot_read_from_an_fp8_cache_is_refused(name):
    with refuses(ValueError, f"attn_implementation='{name}'", "'sdpa'"):
        attention.with_fp8_cache(name)


def test_scaled_sums_of_a_residual_stream_are_left_to_the_model():
    """Granite adds 0.22 times what a layer gives. What a norm reads must not be the plain sum."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    torch.manual_seed(0)
    config = GraniteConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, residual_multiplier=0.22)
    model = AutoModelForCausalLM.from_config(config)  # in float32, where nothing is rounded
    ids = torch.arange(2, 26).view(2, 12)
    with torch.no_grad():
        before = model(ids).logits
        round_as_vllm(model)
        torch.testing.assert_close(model(ids).logits, before)


@pytest.mark.parametrize("scheme", [*SCHEMES, "fp8+fp8_kv"])
def test_nothing_is_left_of_the_replicas_mismatch(scheme):
    torch.manual_seed(0)
    policy = tiny_model()
    add_fused_lm_head(policy)
    problems = arithmetic_dataset(96, 0, "train")["prompt"][:]
    prompts = make_tokenizer().apply_chat_template(problems, add_generation_prompt=True)["input_ids"]
    samples = sampled(policy, scheme, prompts)
    apart = mean_gap(policy, *samples)
    aligned = DeployedForward(policy, scheme)
    assert mean_gap(policy, *samples) == pytest.approx(apart, rel=0.2)  # not yet active
    with aligned.active():
        assert mean_gap(policy, *samples) <= 1e-5
    in_float32 = tiny_model()
    add_fused_lm_head(in_float32)
    with DeployedForward(in_float32, scheme, compute=False).active():
        weights_and_activations = mean_gap(in_float32, *samples)
    # Quantization alone removes most of INT4's mismatch and little of the others'.
    assert 1e-4 < weights_and_activations < (0.4 if scheme == "int4" else 1.1) * apart


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_nothing_is_left_of_the_mismatch_of_experts(scheme):
    torch.manual_seed(0)
    policy = make_experts(64)
    add_fused_lm_head(policy)
    samples = sampled(policy, scheme, PROMPTS * 8, new_tokens=12)
    apart = mean_gap(policy, *samples)
    with DeployedForward(policy, scheme).active():
        assert mean_gap(policy, *samples) <= 1e-5 < 5e-5 < apart


def test_a_decoder_that_a_model_calls_past_its_backbone_computes_as_the_replica():
    """OPT's own forward calls `model.decoder`, and never `model`."""
    torch.manual_seed(0)
    policy = random_model(OPTConfig, ffn_dim=64, word_embed_proj_dim=64).eval()
    ids = torch.randint(2, 262, (3, 14))
    with torch.no_grad():
        expected = Replica(policy, "fp8").model(ids).logits
        with DeployedForward(policy, "fp8").active():
            assert torch.equal(policy(ids).logits, expected)


class HandLinear(torch.nn.Linear):
    """Multiplies FP8 numbers and scales the sums; the gradient is that of the product of the scaled factors."""

    def take(self, master):
        self.scale = master.abs().amax(1) / 448
        self.numbers = (master / self.scale[:, None]).to(torch.float8_e4m3fn).float()

    def forward(self, x):
        scale = x.detach().float().abs().amax(-1, keepdim=True) / 448
        numbers = (x.detach().float() * (1 / scale)).to(torch.float8_e4m3fn).float()
        passed = x * 1.0
        passed.data.copy_((numbers * scale).to(x.dtype))  # x + (rounded − x) would round once more in bfloat16
        product = torch.nn.functional.linear(passed, self.weight)
        product.data.copy_((numbers @ self.numbers.t() * scale * self.scale).to(x.dtype))
        return product


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "int4"])
def test_gradients_are_those_of_a_bf16_model_whose_weights_are_the_deployed_ones(scheme):
    policy = make_model(128)
    add_fused_lm_head(policy)
    hand = make_model(128)
    add_fused_lm_head(hand)
    for parameter in hand.parameters():  # not the buffers, whose precision positions need
        parameter.data = parameter.data.bfloat16()
    hand.set_attn_implementation(attention.NAME)
    round_as_vllm(hand)
    for name, weight in policy.named_parameters():
        if scheme != "bf16" and "_proj" in name:
            hand.get_parameter(name).data.copy_(by_hand(weight.detach(), scheme))
            if scheme == "fp8":
                layer = hand.get_submodule(name.removesuffix(".weight"))
                layer.__class__ = HandLinear
                layer.take(weight.detach())
    batch = small_batch()
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    expected = gradients(hand, batch | {"position_ids": positions})
    with DeployedForward(policy, scheme).active():
        ours = gradients(policy, batch)
    assert all(gradient.dtype == torch.float32 for gradient in ours.values())
    # A tied matrix adds up the gradients of embedding and head, here in float32 and there in bfloat16.
    tied = "model.embed_tokens.weight"
    assert_same({tied: ours.pop(tied)}, {tied: expected.pop(tied)}, tolerance=5e-3)
    assert_same(ours, expected)


@pytest.mark.parametrize("fused", [False, True])
def test_follows_the_optimizer(fused):
    """Also one that changes parameters in kernels of its own, of which their versions do not tell."""
    policy, batch = make_model(128), small_batch()
    add_fused_lm_head(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.05, fused=fused)
    with DeployedForward(policy, "fp8").active():
        for _ in range(2):
            gradients(policy, batch)
            optimizer.step()
            fresh = make_model(128)
            fresh.load_state_dict(policy.state_dict())
            add_fused_lm_head(fresh)
            with DeployedForward(fresh, "fp8").active(), torch.no_grad():
                assert torch.equal(logps(policy, batch, 8), logps(fresh, batch, 8))


def test_parameters_come_back_after_an_error():
    policy = make_model(128)
    before = dict(policy.named_parameters())

    def fail(*_):
        raise RuntimeError("within a layer")

    policy.model.layers[1].mlp.act_fn.register_forward_hook(fail)
    with (
        DeployedForward(policy, "fp8").active(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        refuses(RuntimeError, "within a layer"),
    ):
        policy(input_ids=torch.tensor([[5, 6]]))
    assert not torch.is_autocast_enabled("cpu")
    assert all(parameter is before[name] for name, parameter in policy.named_parameters())


@pytest.mark.parametrize("experts", [False, True])
def test_layers_are_recomputed_as_they_were_computed(experts):
    batch, results = small_batch(), []
    for checkpointing in (False, True):
        policy = make_experts(64) if experts else make_model(128)
        add_fused_lm_head(policy)
        policy.train()
        if checkpointing:
            policy.gradient_checkpointing_enable()
        with DeployedForward(policy, "fp8").active():
            results.append(gradients(policy, batch))
    assert_same(results[1], results[0])


LORA = {"r": 4, "init_lora_weights": False, "target_modules": ["q_proj", "down_proj"]}


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("int4", {"modules_to_save": ["o_proj", "norm"]}),
        ("fp8", {"target_modules": "all-linear"}),
        ("fp8", {"base": torch.bfloat16}),
    ],
)
def test_adapters_are_merged(scheme, options):
    torch.manual_seed(0)
    options = dict(options)
    base = make_model(128).to(options.pop("base", torch.float32))
    add_fused_lm_head(base)
    policy = get_peft_model(base, LoraConfig(**LORA | options))
    samples = sampled(policy, scheme, PROMPTS * 8, new_tokens=12)
    aligned = DeployedForward(policy, scheme)
    with aligned.active():
        assert mean_gap(policy, *samples) <= 2e-5
        with policy.disable_adapter():
            assert mean_gap(policy, *samples) > 1e-3


def test_gradients_of_adapters_are_those_of_the_merged_weight():
    torch.manual_seed(0)
    policy = get_peft_model(make_model(128), LoraConfig(**LORA | {"lora_alpha": 6}))
    add_fused_lm_head(policy.get_base_model())
    whole = make_model(128)
    whole.load_state_dict(dict(policy_tensors(policy)), strict=False)  # with buffers that are computed
    add_fused_lm_head(whole)
    batch = small_batch()
    with DeployedForward(whole, "fp8").active():
        of_weights = gradients(whole, batch)
    with DeployedForward(policy, "fp8").active():
        ours = gradients(policy, batch)
    expected = {}
    for name, parameter in policy.named_parameters():
        if "lora_A" in name:
            b_name = name.replace("lora_A", "lora_B")
            gradient = of_weights[name.removeprefix("base_model.model.").replace("lora_A.default.", "")]
            b = policy.get_parameter(b_name).detach()
            expected[name] = 1.5 * b.T @ gradient
            expected[b_name] = 1.5 * gradient @ parameter.detach().T
    assert_same(ours, expected, tolerance=1e-5)


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_adapters_of_experts_are_merged(base):
    torch.manual_seed(0)
    targets = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    policy = get_peft_model(make_experts(64).to(base), LoraConfig(r=4, init_lora_weights=False, **targets))
    add_fused_lm_head(policy.get_base_model())
    samples = sampled(policy, "fp8", PROMPTS * 8, new_tokens=12)
    with DeployedForward(policy, "fp8").active():
        assert mean_gap(policy, *samples) <= 2e-5
        found = gradients(policy, small_batch())
    assert len(found) == sum(parameter.requires_grad for parameter in policy.parameters())
    assert all(gradient.isfinite().all() and gradient.abs().max() > 0 for gradient in found.values())


def test_dropout_of_adapters_is_left_out():
    policy = get_peft_model(make_model(128), LoraConfig(**LORA, lora_dropout=0.5))
    aligned = DeployedForward(policy, "fp8")
    policy.train()
    with aligned.active(), torch.no_grad():
        first, second = (policy(input_ids=torch.tensor([[5, 6, 7]])).logits for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_adapters_that_are_no_sum_are_refused(options):
    policy = get_peft_model(make_model(128), LoraConfig(**LORA, **options))
    with refuses(ValueError, "peft_config", "'model.layers.0.self_attn.q_proj'", "use_dora", "lora_bias"):
        DeployedForward(policy, "fp8")
