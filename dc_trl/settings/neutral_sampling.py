"""Settings of generation that do not change the sampled distribution from the policy's.

What else changes the engine's distribution, or the log-probabilities that it returns, would be constrained as if it
were mismatch. So every setting that is not listed here counts as a restriction. Top-p, top-k and min-p restrict too;
where the engine returns the tokens that they keep, `truncation` corrects for it.

The names are those of transformers' `GenerationConfig` (5.17) and of vLLM's `SamplingParams` and completion requests
(0.31): `generation_kwargs` go to the one that samples.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..version import DOCS


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Settings of when a completion ends, how it is computed and what is returned of it, which may have any value.
_ANY_VALUE = _names(
    "max_new_tokens max_length max_time max_tokens stop stop_token_ids include_stop_str_in_output ignore_eos"
    " seed bos_token_id eos_token_id pad_token_id decoder_start_token_id use_cache cache_implementation cache_config"
    " max_cache_len compile_config disable_compile prefill_chunk_size detokenize skip_special_tokens"
    " spaces_between_special_tokens transformers_version priority cache_salt request_id session_id user"
    " renormalize_logits"  # log-softmax, which leaves the softmax unchanged
    " temperature"  # which both engines apply; see `restrictions`
)
# What the replica's `generate` would end by other means than tokens, or return in another form.
OUT_OF_REPLICA = _names(
    "stop_strings num_beams num_return_sequences return_dict_in_generate penalty_alpha dola_layers constraints"
    " force_words_ids prompt_lookup_num_tokens assistant_early_exit use_mtp speculation_type"
)
# What vLLM's engine reads (0.31), and at the end what its server reads beside; a server ignores other names.
VLLM_SETTINGS = _names(
    "n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p seed stop"
    " stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids"
    " prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens"
    " spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval skip_clone"
    " output_text_buffer_length structured_outputs logit_bias allowed_token_ids extra_args bad_words"
    " skip_reading_prefix_cache thinking_token_budget repetition_detection routed_experts_prompt_start"
    " trace_decode_token_ids priority cache_salt request_id session_id user response_format length_penalty"
    " use_beam_search truncate_prompt_tokens truncation_side add_special_tokens kv_transfer_params ec_transfer_params"
    " vllm_xargs"
)
# Values that have no effect; those of other settings are None, False and empty ones. The last is the recommended one.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "top_k": (-1, 0),  # None is transformers' default of 50, or the model's own
    "min_p": (None, 0.0),
    **dict.fromkeys(("top_p", "repetition_penalty", "typical_p", "encoder_repetition_penalty"), (None, 1.0)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "epsilon_cutoff", "eta_cutoff"), (None, 0.0)),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens", "min_tokens"), (None, 0)),
    **dict.fromkeys(("num_beams", "num_return_sequences", "guidance_scale"), (None, 1)),
    "logprobs": (0,),  # with more, TRL would read the most probable token's as the sampled one's
}
_SERVER_SETTINGS = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
# Settings that truncate a distribution without changing the ratios of what they keep, with the value that keeps all.
TRUNCATIONS = {"top_p": 1.0, "top_k": 0, "min_p": None}
# Fields of a configuration that say how an engine samples.
SAMPLING_FIELDS = (*TRUNCATIONS, "repetition_penalty", "vllm_structured_outputs_regex")
# Settings that a vLLM server takes from the model's generation_config where a request omits them (Qwen3's truncates to
# 20 tokens), except temperature, with the value that has no effect.
SERVER_DEFAULTS = {name: _NEUTRAL_VALUES[name][-1] for name in _SERVER_SETTINGS}


def truncations(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of top-p, top-k and min-p that truncate the distribution; `settings` are as in `restrictions`."""
    values = {name: settings[name] for name in TRUNCATIONS if name in settings}
    return {name: value for name, value in values.items() if value not in _NEUTRAL_VALUES[name]}


def restriction_warning(settings: Mapping[str, Any], remedy: str) -> str:
    """Return a warning that the discrepancy contains what `settings` do to the sampler; `remedy` avoids it."""
    named = " and ".join(f"{name}={value!r}" for name, value in settings.items())
    return (
        f"{named}: the sampler's distribution is not the policy's, and the rollouts do not say which tokens it kept. "
        "The difference counts as mismatch, and the metrics are called discrepancy_truncated/... instead of "
        f"discrepancy/...: {remedy}; see {DOCS}/concepts.md."
    )


def restrictions(
    settings: Mapping[str, Any], corrected: Collection[str] = (), temperature: float | None = None
) -> Iterator[tuple[str, Any, str]]:
    """Yield the settings with which an engine may sample, or report, another distribution than the policy's.

    Args:
        settings: generation settings by name.
        corrected: names of `TRUNCATIONS` that are corrected for.
        temperature: temperature of the policy; None allows any.

    Yields:
        Name, value and remedy.
    """
    for name, value in settings.items():
        neutral = _NEUTRAL_VALUES.get(name, ())
        without_effect = value in neutral if neutral else (value is None or value is False or value in ([], {}))
        if name == "temperature" and value not in (None, temperature) and temperature is not None:
            yield name, value, "leave temperature out"  # of what stands beside the field
        if name in _ANY_VALUE or without_effect:
            continue
        if name in corrected and value is not None:
            continue
        yield name, value, f"set {name}={neutral[-1]!r}" if neutral else f"leave {name} out"
