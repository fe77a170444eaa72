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
from dc_trl.settings.neutral_sampling import TRUNCATIONS, restrictions

from .helpers import at_server, logged, make_config, make_model, make_trainer, plain_logps, refuses
from .stub_server import stub_server
from .vllm_server import requires_vllm


PROMPTS = [[20, 30, 40], [50], [60, 70, 80, 90, 100]] * 8
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


def sampled(replica, **settings):
    """Completions and log-probabilities from one random state."""
    torch.manual_seed(0)
    config = {"max_new_tokens": 12, "do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": [1, 40, 41]}
    return replica.generate(PROMPTS, GenerationConfig(**config | settings), 1.0)


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
    plain, restricted = sampled(replica), sampled(replica, **{name: RESTRICTING[name]})
    assert plain[0] != restricted[0]
    if name not in WARPERS:
        assert mean_gap(replica, *restricted) > 3 * mean_gap(replica, *plain)


def test_what_is_accepted_changes_nothing(replica, tmp_path):
    plain = sampled(replica)
    for name, value in NEUTRAL.items():
        make_config(tmp_path, generation_kwargs={name: value})
        assert sampled(replica, **{name: value}) == plain, name
    of_vllm = {"ignore_eos": True, "stop": ["\n"], "seed": 7, "top_k": -1, "presence_penalty": 0.0, "logprobs": 0}
    make_config(tmp_path, use_vllm=True, generation_kwargs=of_vllm)


def test_every_setting_of_transformers_is_known_and_restricts_nothing_by_default():
    known = {name: value for name, value in vars(GenerationConfig(do_sample=True, top_k=0)).items() if name[0] != "_"}
    assert not list(restrictions(known))


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
