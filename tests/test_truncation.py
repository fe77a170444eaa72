"""Truncated sampling: both engines' log-probabilities are among the tokens that were kept, and so are gradients."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import (
    BertConfig,
    CohereConfig,
    Gemma2Config,
    GenerationConfig,
    HyperCLOVAXConfig,
    OPTConfig,
    PhiConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from trl import GRPOTrainer
from trl.generation.vllm_client import parse_logprobs
from trl.trainer.utils import add_fused_lm_head

from dc_trl import DCGRPOTrainer
from dc_trl.gate.loaded_policy import require_same_logits
from dc_trl.parts import kept_tokens
from dc_trl.parts.kept_tokens import KeptHead, Named
from dc_trl.quantization.head import FusedHead, logits_of
from dc_trl.sampling.named_tokens import KeptLogProb, named_by_vllm
from dc_trl.sampling.replica import Replica

from . import helpers
from .helpers import (
    MISALIGNED,
    Rollouts,
    assert_finite,
    assert_same_weights,
    completion_logits,
    logged,
    make_config,
    make_experts,
    make_model,
    make_prompts,
    random_model,
    refuses,
)


TRUNCATED = [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.8, "top_k": 20, "min_p": 0.01}]
by_name = lambda settings: "-".join(settings)  # noqa: E731
VOCABULARY = 262


def kept_of(sets):
    """`Named.kept` of token ids, by completion and position."""
    logprobs = [[KeptLogProb(0.0, torch.tensor(ids).int()) if ids else math.nan for ids in row] for row in sets]
    return Named.kept(logprobs, torch.device("cpu"))


def dense(logits, sets, sampled):
    """log π(y | K) by a softmax over the whole vocabulary, with -inf outside of K; K = ∅ keeps all."""
    mask = torch.full(logits.shape, -math.inf, dtype=logits.dtype)
    for row, positions in enumerate(sets):
        for position, ids in enumerate(positions):
            mask[row, position, ids if ids else slice(None)] = 0.0
    return (logits + mask).log_softmax(-1).gather(2, sampled.unsqueeze(2)).squeeze(2)


def sets_of(batch):
    """The kept tokens of each completion of a batch, position by position."""
    return [
        [ids.tolist() for ids in row[row >= 0].split(counts.tolist())]
        for row, counts in zip(batch["kept_ids"], batch["kept_counts"], strict=True)
    ]


@settings(max_examples=60)
@given(data=st.data())
def test_log_probabilities_and_gradients_are_those_of_the_whole_vocabulary_with_the_rest_masked(data):
    rows, positions, vocabulary = (data.draw(st.integers(1, most)) for most in (3, 4, 9))
    ids = st.lists(st.integers(0, vocabulary - 1), max_size=vocabulary, unique=True)
    sets = [[data.draw(ids) for _ in range(positions)] for _ in range(rows)]
    temperature, tile = data.draw(st.sampled_from([0.5, 1.0, 1.7])), data.draw(st.sampled_from([1, 12, 2**20]))
    model = make_model(8, data.draw(st.integers(0, 100)), vocab_size=vocabulary, tie_word_embeddings=False)
    model.lm_head = torch.nn.Linear(8, vocabulary, bias=data.draw(st.booleans()))
    inputs = (3 * torch.randn(rows, positions + 2, 8)).requires_grad_()
    sampled = torch.tensor([[ids[0] if ids else 0 for ids in row] for row in sets])
    whole = torch.randn(rows, positions)

    def scored():
        with KeptHead(model, kept_of(sets), sampled, temperature, False) as head:
            for first in range(0, rows, 2):  # in the batches that TRL makes
                model.base_model(inputs_embeds=inputs[first : first + 2])
        return head.log_probs(whole)

    def reference():
        logits = model(inputs_embeds=inputs).logits[:, -positions - 1 : -1]
        values = dense(logits / temperature, sets, sampled)
        nothing_cut = torch.tensor([[not ids for ids in row] for row in sets])
        return torch.where(nothing_cut, whole, values)

    weights = torch.randn(rows, positions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_tokens, "_TILE", tile)
        got, expected = (
            (values, torch.autograd.grad((values * weights).sum(), [inputs, *model.lm_head.parameters()]))
            for values in (scored(), reference())
        )
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


WIDE = {"head_dim": 16, "initializer_range": 0.2}
MODELS = {
    "qwen3": make_model,
    "experts": make_experts,
    "softcap": lambda: random_model(Gemma2Config, final_logit_softcapping=2.0, **WIDE),
    "multiplied": lambda: random_model(CohereConfig, logit_scale=0.25, **WIDE),
    "multiplied by its divisor": lambda: random_model(HyperCLOVAXConfig, logits_scaling=3.0, **WIDE),
    "peft": lambda: get_peft_model(make_model(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_logits_are_those_of_the_model(make):
    """By a forward with TRL's fused head at temperature 0.7."""
    torch.manual_seed(0)
    model = make()
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    add_fused_lm_head(base, temperature=0.7)
    completion_ids = torch.randint(10, 200, (3, 5))
    sets = [
        [[token.item(), *(201, 230, 5, 261)[: position % 5]] for position, token in enumerate(row)]
        for row in completion_ids
    ]
    ids = torch.cat([torch.full((3, 3), 7), completion_ids], dim=1)
    with KeptHead(base, kept_of(sets), completion_ids, 0.7, False) as head:
        whole = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs[:, 2:]
    logits = model(input_ids=ids).logits[:, 2:-1].float() / 0.7
    expected = dense(logits, sets, completion_ids)
    torch.testing.assert_close(head.log_probs(whole), expected, atol=1e-5, rtol=1e-5)


# Fields that say what a model does around its output head, each with a value that does something.
AROUND_HEAD = {
    **dict.fromkeys(("logit_scale", "output_multiplier", "lm_head_multiplier"), 0.25),
    **dict.fromkeys(("logits_scaling", "logits_mup_width_multiplier"), 3.0),
    **dict.fromkeys(("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"), 2.0),
    "lm_head_bias": True,
}
ELSEWHERE = {"num_logits_to_keep", "output_router_logits", "chunk_size_lm_head"}
ELSEWHERE |= {"attn_logit_softcapping", "moe_router_logit_softcapping"}
# What makes one of these small.
MORE = {
    "CohereCompassTextConfig": {
        "rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [6, 6, 4]}}
    },
    "FalconH1Config": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "Gemma3nTextConfig": {
        "layer_types": ["full_attention"],
        "vocab_size_per_layer_input": 262,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0],
        "altup_num_inputs": 2,
        "intermediate_size": [64],
    },
    "GraniteMoeHybridConfig": {"layer_types": ["attention"]},
    "MiniCPM3Config": {
        "num_key_value_heads": 2,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "dim_model_base": 16,
    },
    "RecurrentGemmaConfig": {"block_types": ["attention"]},
    "BertConfig": {"is_decoder": True},
    "OPTConfig": {"word_embed_proj_dim": 32},
}


@pytest.mark.long
def test_logits_are_those_of_every_architecture_or_refused():
    """Of all whose configuration has such a field, and of some with a bias, more layers or another backbone."""
    refused = []
    for config in MODEL_FOR_CAUSAL_LM_MAPPING:
        names = {name for name in dir(config) if re.search("logits?_|lm_head_|output_multi", name)} - ELSEWHERE
        if not names and config not in (BertConfig, OPTConfig, PhiConfig):
            continue
        fields = {name: AROUND_HEAD[name] for name in names if not isinstance(getattr(config, name), property)}
        model = random_model(config, **fields | MORE.get(config.__name__, {})).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
        ids = torch.arange(20, 36).view(1, -1)
        own = model(input_ids=ids, use_cache=False).logits[0]
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        for head in (None, FusedHead(model.get_output_embeddings(), hidden)):
            torch.testing.assert_close(logits_of(model, hidden[0], head), own, atol=1e-4, rtol=1e-4)
        add_fused_lm_head(model, temperature=0.7)
        fused = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs[0]
        among = dense(own[None, :-1] / 0.7, [[[]] * 15], ids[:, 1:])[0]
        if torch.allclose(fused, among, atol=1e-3):
            require_same_logits(model, 0.7)
        else:
            refused.append(config.model_type)
            with refuses(ValueError, type(model).__name__):
                require_same_logits(model, 0.7)
    assert 0 < len(refused) < 8, refused


# --- the replica ----------------------------------------------------------------------------------------------------

PROMPTS = [[20, 30, 40], [50], [60, 70, 80, 90, 100]] * 4


@pytest.fixture(scope="module")
def replica():
    return Replica(make_model(), "bf16")


def sample(replica, among_kept=True, temperature=1.0, **fields):
    """Completions and log-probabilities from one random state."""
    torch.manual_seed(0)
    common = {"max_new_tokens": 12, "do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": [1, 40, 41]}
    config = GenerationConfig(**common | fields, temperature=temperature)
    return replica.generate(PROMPTS, config, temperature, among_kept=among_kept)


@pytest.mark.parametrize("fields", TRUNCATED, ids=by_name)
def test_the_replica_samples_from_what_it_says_it_keeps(replica, fields):
    completions, logprobs = sample(replica, temperature=0.6, **fields)
    sizes = []
    for prompt, ids, values in zip(PROMPTS, completions, logprobs, strict=True):
        with torch.no_grad():
            logits = replica.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float() / 0.6
        for probs, token, value in zip(logits.softmax(-1), ids, values, strict=True):
            kept = value.tokens.long()
            sizes.append(len(kept))
            assert token in kept
            mass, least = probs[kept].sum(), probs[kept].min()
            # bf16 differs between a cached and a whole forward, here and below.
            assert value == pytest.approx((probs[token] / mass).log().item(), abs=0.05)
            assert probs.index_fill(0, kept, 0.0).max() <= 1.05 * least
            if fields == {"top_k": 5}:  # or ties for the fifth
                assert len(kept) == 5 or probs[kept].log().sort().values[: len(kept) - 4].std() < 0.05
            if fields == {"top_p": 0.9}:
                assert 0.88 < mass < 1.0
                assert mass - least < 0.92
            if fields == {"min_p": 0.1}:
                assert 0.095 < (least / probs.max()).item() <= 1.0
    assert max(sizes) < 0.7 * VOCABULARY


@pytest.mark.parametrize("fields", [*TRUNCATED, {"top_p": 0.5, "top_k": 4}], ids=by_name)
def test_the_replica_samples_what_generate_samples(replica, fields):
    """Token by token of the same random numbers, by the processors of transformers in their own order."""
    own, theirs = (sample(replica, among_kept, temperature=0.6, **fields)[0] for among_kept in (True, False))
    assert own == theirs


# --- vLLM -----------------------------------------------------------------------------------------------------------


def test_what_vllm_names_is_renormalised():
    """Two kept tokens of three that are named; four that share the last places, of which three are named; NaN."""
    logprobs = [
        [math.log(0.75), math.log(0.25), -9999.0],
        [math.log(0.5), math.log(0.25), math.log(0.125), -math.inf],
        [None, -1.0],
    ]
    tokens = [[9, 7, 4], [2, 1, 3, 8], [5, 6]]
    ((first,), (second,), (third,)) = named_by_vllm([[7, 3, 5]], [logprobs], [tokens], most=3, truncated=True)[0]
    assert first == pytest.approx(math.log(0.25))
    assert first.tokens.tolist() == [9, 7]
    assert second == pytest.approx(math.log(0.125 / 0.875))
    assert second.tokens.tolist() == [2, 1, 3]
    assert second.logps.exp().tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert math.isnan(third)


def test_without_truncation_vllm_names_its_most_probable_tokens_whichever_was_sampled():
    """Of a third token, the least probable one, there is its own log-probability, as it is; and NaN."""
    logprobs = [[math.log(0.5), math.log(0.25)], [math.log(0.5), math.log(0.25), math.log(0.125)], [None, -1.0]]
    tokens = [[9, 7], [2, 1, 3], [5, 6]]
    ((first,), (second,), (third,)) = named_by_vllm([[7, 3, 5]], [logprobs], [tokens], most=2, truncated=False)[0]
    assert (first, second) == pytest.approx((math.log(0.25), math.log(0.125)))
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([9, 7], [2, 1])
    assert second.logps.exp().tolist() == pytest.approx([0.5, 0.25])
    assert math.isnan(third)


@pytest.mark.parametrize("sampled", [2, 1, 3, 8])
def test_tokens_as_probable_as_the_last_one_are_named_whichever_was_sampled(sampled):
    """Three tokens share the second place of two. TRL's own reading of a server's answer, which names the sampled one
    first, and the two that the engine chose, of which it may be one."""
    chosen = {"token_id:2": math.log(0.4), "token_id:1": math.log(0.2)}
    token, logp = f"token_id:{sampled}", math.log(0.4 if sampled == 2 else 0.2)
    answer = {"tokens": [token], "token_logprobs": [logp], "top_logprobs": [{token: logp} | chosen]}
    logprobs, tokens = parse_logprobs([answer])
    (((value,),),) = named_by_vllm([[sampled]], logprobs, tokens, most=2, truncated=False)
    assert value == pytest.approx(logp)
    assert value.tokens.tolist() == [2, 1]
    assert value.logps.exp().tolist() == pytest.approx([0.4, 0.2])


# --- training -------------------------------------------------------------------------------------------------------


def train(output_dir, kind=DCGRPOTrainer, model=None, **fields):
    fields = {"deployment_scheme": None if "rollout_func" in fields else "bf16", "max_steps": 2} | fields
    trainer = helpers.make_trainer(output_dir, model, kind=kind, eval_dataset=make_prompts(4), **fields)
    trainer.train()
    return trainer


class Watched(DCGRPOTrainer):
    """Keeps (log π_train among the kept tokens, that of the whole vocabulary) of every forward."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        among = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with torch.no_grad():
            whole = GRPOTrainer._get_per_token_logps_and_entropies(self, *args, **kwargs)
        self.__dict__.setdefault("seen", []).append((among[0].detach(), whole[0]))
        return among


@pytest.mark.parametrize(
    "acting",
    [{"constraint": "static", "lambda_init": 0.0}, {"rollout_correction": "geometric_mask(0, 9)"}],
    ids=by_name,
)
def test_the_gradient_is_that_of_the_truncated_policy(tmp_path, seen_by_the_loss, acting):
    """One GRPO step with λ = 0, or a mask that keeps all: Σ Â·∇log π(y | K) / |o| / N, by the whole vocabulary."""
    gradients = {}

    class Caught(DCGRPOTrainer):
        def training_step(self, *args):
            loss = super().training_step(*args)
            gradients.update({name: each.grad.clone() for name, each in self.model.named_parameters()})
            return loss

    train(tmp_path, Caught, max_steps=1, top_k=5, temperature=0.8, **{"constraint": "none"} | acting)
    (inputs,) = seen_by_the_loss
    model = make_model()
    mask = inputs["completion_mask"]
    sets = sets_of(inputs)
    assert all(len(ids) >= 5 for row in sets for ids in row[:1])
    logps = dense(completion_logits(model, inputs) / 0.8, sets, inputs["completion_ids"])
    advantages = inputs["advantages"]  # neither penalised nor weighed
    (-(advantages * logps * mask).sum(1) / mask.sum(1)).mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "fields",
    [
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 3, "num_iterations": 2},
        {"bf16": True, "gradient_checkpointing": True},
        {"eval_steps": 1, "per_device_eval_batch_size": 4},
        {"cast_lm_head_to_fp32": True, "top_entropy_quantile": 0.5},
        {"pad_to_multiple_of": 16, "discrepancy_split": True},
    ],
    ids=by_name,
)
@pytest.mark.parametrize("constraint", ["lagrangian", "none"])
def test_training_on_truncated_samples_measures_no_truncation(tmp_path, constraint, fields):
    trainer = train(tmp_path, top_p=0.9, top_k=10, constraint=constraint, **fields)
    assert_finite(trainer)
    assert max(logged(trainer, "discrepancy/log_ppl_abs_diff")) < 0.05
    parts = logged(trainer, "discrepancy/engine_mean")
    assert len(parts) == ("discrepancy_split" in fields) * trainer.state.global_step
    assert all(mean < 0.01 for mean in parts)


def test_the_reference_is_scored_among_the_same_tokens(tmp_path):
    """A reference that is the policy itself: both are truncated, so that KL is 0."""
    model = make_model()
    model.save_pretrained(tmp_path / "model")
    trainer = train(tmp_path, model=str(tmp_path / "model"), beta=0.1, top_k=5, max_steps=1)
    assert logged(trainer, "kl") == pytest.approx([0.0], abs=1e-6)


# --- measured alone: constraint="none" ------------------------------------------------------------------------------

ALONE = {"constraint": "none", "learning_rate": 0.0}
ACTS_ON_NOTHING = [{"constraint": "static", "lambda_init": 0.0}, {}]


@pytest.mark.parametrize("steps", [1, 2], ids=["in the loss", "when it is sampled"])
@pytest.mark.parametrize("fields", TRUNCATED, ids=by_name)
def test_what_is_measured_alone_is_what_a_constraint_would_act_on(tmp_path, seen_by_the_loss, fields, steps):
    """The policy and its replica agree in bf16, and both meters give the same numbers; the loss has the whole."""
    fields = fields | {"steps_per_generation": steps, "gradient_accumulation_steps": 1, "max_steps": 2}
    measured = []
    for constraint in ACTS_ON_NOTHING:
        trainer = train(tmp_path, Watched, make_model().bfloat16(), **ALONE | constraint | fields)
        names = ("mean", "kl", "k3_kl", "ess", "probs_diff_max", "log_ppl_abs_diff")
        measured.append({name: logged(trainer, f"discrepancy/{name}") for name in names})
    constrained, alone = measured
    assert alone == constrained
    assert max(alone["log_ppl_abs_diff"]) < 0.02
    scored, whole = trainer.seen[-1]
    assert torch.equal(scored, whole)
    inputs = seen_by_the_loss[-1]
    mask, reported = inputs["completion_mask"].bool(), inputs["sampling_per_token_logps"]
    assert (whole - reported)[mask].abs().mean() < 0.02
    assert (inputs["kept_logps"] - reported)[mask].mean() > 0.04  # the mass that was cut off


def test_what_is_measured_alone_is_of_the_policy_and_not_of_its_reference(tmp_path):
    """Which is the model without its random adapter; length-aware batches would hide its columns from the batch."""
    fields = {"top_k": 5, "beta": 0.1, "length_aware_batches": False}
    fields |= MISALIGNED
    measured = []
    for constraint in ACTS_ON_NOTHING:
        adapter = LoraConfig(target_modules="all-linear", init_lora_weights=False)
        torch.manual_seed(1)
        trainer = train(tmp_path, peft_config=adapter, **ALONE | constraint | fields)
        measured.append(logged(trainer, "discrepancy/mean"))
    assert measured[1] == measured[0]
    assert max(measured[0]) < 0.05


@pytest.mark.parametrize("length_aware", [True, False])
def test_the_lag_that_is_measured_alone_is_that_of_two_versions_of_the_weights(tmp_path, length_aware):
    """Where TRL scores the batch as it is sampled: δ̄ of the lag by two forwards of another model."""
    fields = {"num_iterations": 2, "gradient_accumulation_steps": 1, "max_steps": 4, "learning_rate": 1e-2}
    fields |= {"constraint": "none", "discrepancy_split": True, "weight_sync_steps": 3, "top_k": 5}
    fields |= {"deployment_scheme": "bf16"}
    trainer = helpers.make_trainer(tmp_path, make_model(), length_aware_batches=length_aware, **fields)
    watch = helpers.Watch(trainer)
    trainer.train()
    batch, model, probs = watch.batches[2], make_model(), []
    for step in (2, 0):
        model.load_state_dict(watch.weights[step])
        with torch.no_grad():
            probs.append(dense(completion_logits(model, batch), sets_of(batch), batch["completion_ids"]).exp())
    mask = batch["completion_mask"]
    expected = (((probs[0] - probs[1]).abs() * mask).sum(1) / mask.sum(1)).mean().item()
    assert expected > 1e-3
    assert logged(trainer, "sync/age") == [0, 2]
    assert logged(trainer, "discrepancy/lag_mean") == pytest.approx([0.0, expected], rel=1e-4)


@pytest.mark.parametrize("steps", [{}, MISALIGNED], ids=by_name)
def test_losses_of_what_is_measured_alone_are_trls_own(tmp_path, steps):
    def keep(call, completions, logprobs):
        for ids, values in zip(completions, logprobs, strict=True):
            for position, (token, value) in enumerate(zip(ids, values, strict=True)):
                kept = torch.tensor([3, token, 4], dtype=torch.int32)
                values[position] = KeptLogProb(-0.3 * (token % 4), kept, reported=value)

    # TRL's mask of trajectories reads the engine's log-probabilities, which have to be those that it reports.
    fields = {"top_k": 3, "off_policy_mask_threshold": 2.0, "constraint": "none", "max_steps": 4} | steps
    ours, theirs = (
        train(tmp_path, kind, rollout_func=Rollouts(edit=edit), length_aware_batches=False, **fields)
        for kind, edit in ((DCGRPOTrainer, keep), (GRPOTrainer, None))
    )
    for name in ("loss", "grad_norm"):
        assert logged(ours, name) == logged(theirs, name)
    assert_same_weights(ours.model, theirs.model)
    assert logged(ours, "discrepancy/mean")


def test_what_is_not_known_has_another_name(tmp_path, caplog):
    trainer = train(tmp_path, rollout_func=Rollouts(), top_k=3, **ALONE)
    whole = train(tmp_path, rollout_func=Rollouts(), **ALONE)
    assert logged(trainer, "discrepancy_truncated/mean") == logged(whole, "discrepancy/mean")
    assert not [name for row in trainer.state.log_history for name in row if name.startswith("discrepancy/")]
    (warned,) = [message for message in caplog.messages if "discrepancy_truncated" in message]
    assert "top_k=3: " in warned


# --- rollout functions ----------------------------------------------------------------------------------------------


def test_a_rollout_function_that_does_not_say_what_was_kept_is_refused(tmp_path):
    with refuses(ValueError, "do not say which tokens were kept"):
        train(tmp_path, rollout_func=Rollouts(), top_k=3)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_vllm_needs_a_bound_to_name_what_it_keeps(tmp_path):
    """`test_refusals.py` has what is refused without one."""
    vllm = {"use_vllm": True, "vllm_mode": "server"}
    for fields in ({"top_p": 0.9}, {"min_p": 0.1}, {"generation_kwargs": {"top_p": 0.9}}):
        assert make_config(tmp_path, **vllm, **fields, constraint="none").named_tokens == 0
        assert make_config(tmp_path, **vllm, **{"top_k": 64} | fields).named_tokens == 64
    assert make_config(tmp_path, **vllm).named_tokens == 0
    assert make_config(tmp_path, **vllm, score_centering=True).named_tokens == 20
    vllm["vllm_mode"] = "colocate"
    assert make_config(tmp_path, **vllm, top_k=20).named_tokens == 20
    assert make_config(tmp_path, **vllm, top_k=21, constraint="none").named_tokens == 0
