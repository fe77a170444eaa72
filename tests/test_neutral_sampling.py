"""What may be set under a constraint leaves the replica's samples and their log-probabilities, or is corrected for.

The rest is refused. test_truncation.py is about what is corrected for.
"""

import pytest
import torch
from transformers import CompileConfig, GenerationConfig
from trl import GRPOTrainer

from dc_trl import DCGRPOTrainer
from dc_trl.sampling.replica import Replica
from dc_trl.serving.errors import ServerError
from dc_trl.settings.neutral_sampling import OUT_OF_REPLICA, TRUNCATIONS, VLLM_SETTINGS, restrictions

from .helpers import Watch, at_server, logged, make_config, make_model, make_trainer, plain_logps, refuses
from .stub_server import stub_server
from .test_truncation import PROMPTS, sample
from .vllm_server import requires_vllm


# Each would be taken for mismatch. Those of transformers change what the replica records, as is tested below.
RESTRICTING = {
    "top_h": 0.5,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.02,
    "repetition_penalty": 2.0,
    "no_repeat_ngram_size": 1,
    "bad_words_ids": [[token] for token in range(2, 150)],
    "suppress_tokens": list(range(2, 150)),
    "forced_eos_token_id": 1,
    "min_new_tokens": 10,
    "exponential_decay_length_penalty": [1, 3.0],
    "watermarking_config": {"bias": 4.0},
    "do_sample": False,
}
NEUTRAL = {
    "max_new_tokens": 12,
    "max_length": 300,
    "use_cache": True,
    "pad_token_id": 3,
    "renormalize_logits": True,
    "compile_config": CompileConfig(),
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "suppress_tokens": [],
    "num_beams": 1,
    "output_scores": False,
    "do_sample": True,
}


def mean_gap(replica, completions, logprobs):
    """Mean |Δp| between what was recorded and a forward pass of the same model."""
    gaps = []
    for prompt, ids, values in zip(PROMPTS, completions, logprobs, strict=True):
        own = plain_logps(replica.model, prompt, ids).exp()
        gaps.append((own - torch.tensor(values).exp()).abs())
    return torch.cat(gaps).mean().item()


@pytest.fixture(scope="module")
def replica():
    return Replica(make_model(), "bf16")


# The warpers act after the log-probabilities are recorded: with them it is the choice of tokens that differs.
WARPERS = {"top_h", "typical_p", "epsilon_cutoff", "do_sample", "watermarking_config"}


@pytest.mark.parametrize("name", RESTRICTING)
def test_what_is_refused_restricts(replica, name):
    plain, restricted = sample(replica, False), sample(replica, False, **{name: RESTRICTING[name]})
    assert plain[0] != restricted[0]
    if name not in WARPERS:
        assert mean_gap(replica, *restricted) > 3 * mean_gap(replica, *plain)


def test_what_is_accepted_changes_nothing(replica, tmp_path):
    plain = sample(replica, False)
    for name, value in NEUTRAL.items():
        make_config(tmp_path, generation_kwargs={name: value})
        assert sample(replica, False, **{name: value}) == plain, name
    of_vllm = {"ignore_eos": True, "stop": ["\n"], "seed": 7, "top_k": -1, "presence_penalty": 0.0, "logprobs": 0}
    make_config(tmp_path, use_vllm=True, generation_kwargs=of_vllm)


# What else transformers and vLLM take: refused where it would be taken for mismatch.
OTHERS = """
    early_stopping length_penalty forced_bos_token_id remove_invalid_values begin_suppress_tokens sequence_bias
    token_healing output_attentions output_hidden_states output_scores output_logits return_dict_in_generate
    encoder_no_repeat_ngram_size is_assistant num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit
    assistant_lookbehind target_lookbehind assistant_ensemble_weight speculation_type use_mtp penalty_alpha dola_layers
    continuous_batching_config low_memory diversity_penalty num_beam_groups constraints force_words_ids stop_strings
    n watermarking prompt_logprobs prompt_logprob_token_ids prompt_logprob_start logprob_token_ids flat_logprobs
    output_kind stream_interval skip_clone output_text_buffer_length structured_outputs logit_bias allowed_token_ids
    extra_args bad_words skip_reading_prefix_cache thinking_token_budget repetition_detection
    routed_experts_prompt_start trace_decode_token_ids response_format use_beam_search truncate_prompt_tokens
    truncation_side add_special_tokens kv_transfer_params ec_transfer_params vllm_xargs
    """


@requires_vllm
def test_every_setting_of_both_engines_is_known_and_restricts_nothing_by_default():
    from vllm import SamplingParams
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    known = {name: value for name, value in vars(GenerationConfig(do_sample=True, top_k=0)).items() if name[0] != "_"}
    assert not list(restrictions(known))
    # What TRL's client and its request say themselves, and what asks for another answer than TRL's.
    of_trl = {"model", "prompt", "return_token_ids", "return_tokens_as_token_ids", "return_token_offsets"}
    others = {"prompt_embeds", "stream", "stream_options", "echo", "suffix"}
    of_vllm = {name for name in SamplingParams.__struct_fields__ if name[0] != "_"}
    of_vllm |= CompletionRequest.model_fields.keys() - of_trl - others
    assert of_vllm <= VLLM_SETTINGS  # an older one may know less
    others_known = {*OTHERS.split()}
    restricting = {name for name, _, _ in restrictions(dict.fromkeys(known.keys() | VLLM_SETTINGS, "some"))}
    assert restricting - others_known == {*RESTRICTING, *TRUNCATIONS} | {
        *("eta_cutoff", "encoder_repetition_penalty", "min_length", "num_beams", "num_return_sequences"),
        *("guidance_scale", "presence_penalty", "frequency_penalty", "min_tokens", "logprobs"),
    }
    assert others_known < restricting
    assert known.keys() > OUT_OF_REPLICA


def test_only_truncation_is_corrected_for():
    truncating = {"top_p": 0.5, "top_k": 5, "min_p": 0.2}
    assert {name for name, _, _ in restrictions(truncating)} == set(truncating) == set(TRUNCATIONS)
    assert not list(restrictions(truncating, corrected=TRUNCATIONS))
    everything = RESTRICTING | truncating
    assert {name for name, _, _ in restrictions(everything, corrected=TRUNCATIONS)} == set(RESTRICTING)


# --- the model's own generation_config ------------------------------------------------------------------------------


def train(output_dir, of_model, kind=DCGRPOTrainer, **fields):
    model = make_model()
    model.generation_config.update(**of_model, allow_custom_entries=True)
    trainer = make_trainer(output_dir, model, kind=kind, **{"deployment_scheme": "bf16", "max_steps": 2} | fields)
    sampled = []
    generate = trainer._generate_single_turn

    def spy(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        sampled.extend(outputs[0])
        return outputs

    trainer._generate_single_turn = spy
    trainer.train()
    return trainer, sampled


def test_what_trl_sets_itself_overrides_the_models_own(tmp_path):
    qwen3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    plain, with_qwen3s = (train(tmp_path / str(number), of) for number, of in enumerate(({}, qwen3)))
    assert plain[1] == with_qwen3s[1]
    assert logged(plain[0], "discrepancy/mean") == logged(with_qwen3s[0], "discrepancy/mean")


def test_restrictions_of_the_model_are_refused_under_a_constraint(tmp_path):
    with refuses(ValueError, "typical_p=0.9", "generation_config.json"):
        train(tmp_path, {"typical_p": 0.9})


def test_without_a_constraint_the_replica_follows_them_as_trl_does(tmp_path):
    of_model = {"suppress_tokens": list(range(2, 200)), "begin_suppress_tokens": list(range(200, 230))}
    fields = {"constraint": "none", "max_completion_length": 6}
    _, by_replica = train(tmp_path / "replica", of_model, **fields)
    _, by_trl = train(tmp_path / "trl", of_model, kind=GRPOTrainer, deployment_scheme=None, **fields)
    for completions in (by_replica, by_trl):
        assert len(completions) >= 8
        assert not {token for ids in completions for token in ids} & set(range(2, 200))
        assert not {ids[0] for ids in completions} & set(range(200, 230))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"generation_kwargs": {"suppress_tokens": list(range(2, 150))}},
        {"generation_kwargs": {"temperature": 2.0}},
        {"repetition_penalty": 2.0},
        {"of_model": {"suppress_tokens": list(range(2, 150))}},
    ],
)
def test_what_is_measured_with_a_restriction_is_called_by_another_name(tmp_path, settings, caplog):
    of_model = settings.get("of_model", {})
    fields = {name: value for name, value in settings.items() if name != "of_model"}
    trainer, _ = train(tmp_path, of_model, recipe="trl", **fields)
    names = {name for row in trainer.state.log_history for name in row}
    assert ("discrepancy/mean" in names, "discrepancy_truncated/mean" in names) == (not settings, bool(settings))
    warned = [record.getMessage() for record in caplog.records if "discrepancy_truncated" in record.getMessage()]
    given = {**of_model, **fields.get("generation_kwargs", fields)}
    assert [[name in message for name in given] for message in warned] == [[True] for _ in given]


@pytest.mark.parametrize("settings", [{"stop_strings": ["x"]}, {"num_beams": 2}])
def test_what_the_replica_cannot_do_is_refused_of_the_model_too(tmp_path, settings):
    ((name, value),) = settings.items()
    for fields in ({"generation_kwargs": settings}, {"of_model": settings}):
        with refuses(ValueError, f"{name}={value!r}", "use_vllm=True"):
            train(tmp_path, **{"of_model": {}} | fields, recipe="trl")


# --- what ends a completion -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_a_completion_that_the_engine_ends_is_not_cut_off(tmp_path, masked):
    """By other tokens than the model's end tokens, for which alone TRL looks; at the longest length it is cut off."""
    ends = {1, *range(60, 120)}
    fields = {"generation_kwargs": {"eos_token_id": [*ends]}, "mask_truncated_completions": masked, "recipe": "trl"}
    trainer = make_trainer(tmp_path, deployment_scheme="bf16", max_steps=1, length_aware_batches=False, **fields)
    batches = Watch(trainer).batches
    trainer.train()
    (batch,) = batches
    counted = batch["completion_mask"] * batch["tool_mask"]
    cut = 0
    for ids, counts in zip(batch["completion_ids"].tolist(), counted, strict=True):
        length = next((number for number, token in enumerate(ids[:8], 1) if token in ends), 8)
        ended = ids[length - 1] in ends
        cut += not ended
        assert counts.tolist() == [int(number < length and (ended or not masked)) for number in range(len(ids))]
    assert 0 < cut < 4
    assert logged(trainer, "completions/clipped_ratio") == [cut / 4]


@requires_vllm
def test_penalties_that_a_server_takes_from_the_model_are_refused(tmp_path):
    with stub_server() as server:
        fields = at_server(server.url) | {"vllm_server_timeout": 60.0, "vllm_max_retries": 0, "top_p": 1.0}
        with refuses(ValueError, "presence_penalty=1.5", "generation_config", "constraint='none'"):
            train(tmp_path, {"presence_penalty": 1.5}, **fields)
        # Said by the request, it is no matter, and the trainer asks this server, which answers no rollout.
        requested = {"generation_kwargs": {"presence_penalty": 0.0}}
        server.says = {"/v1/completions": (400, "no")}
        with refuses(ServerError, server.url, "/v1/completions", 400):
            train(tmp_path, {"presence_penalty": 1.5, "top_k": 20, "do_sample": True}, **fields | requested)
