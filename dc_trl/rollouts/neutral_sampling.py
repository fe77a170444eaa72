"""Settings of generation that do not change the sampled distribution from the policy's.

A constraint compares the engine's log-probability of a token with the policy's at one temperature. A setting that
changes or restricts the engine's distribution, or the log-probabilities that it returns, would be constrained as if it
were mismatch. So the settings without such an effect are listed here, and every other one counts as a restriction.
Top-p, top-k and min-p restrict too; where the engine returns the tokens that they keep, `truncation` corrects for it.

The names are those of transformers' `GenerationConfig` (5.17) and of vLLM's `SamplingParams` and completion requests
(0.31): `generation_kwargs` go to the one that samples.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any


# Settings of when a completion ends, how it is computed and what is returned of it, which may have any value.
_ANY_VALUE = frozenset(
    {
        # transformers
        *("max_new_tokens", "max_length", "max_time", "stop_strings"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory"),
        *("compile_config", "disable_compile", "prefill_chunk_size"),
        "renormalize_logits",  # log-softmax, which leaves the softmax unchanged
        *("early_stopping", "length_penalty"),  # for beam search, which is refused
        # For assisted generation, which is refused too.
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind"),
        *("decoder_start_token_id", "continuous_batching_config", "transformers_version"),
        # vLLM
        *("max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "repetition_detection", "seed"),
        "ignore_eos",  # decides when to stop; min_tokens would keep end tokens from being sampled
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
        *("priority", "user", "session_id", "cache_salt", "skip_reading_prefix_cache"),
    }
)

# Values of the other settings that have no effect; the last one is the value to recommend.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    # both
    "top_k": (-1, 0),  # None is transformers' default of 50, or the model's own
    "min_p": (None, 0.0),
    **dict.fromkeys(("top_p", "repetition_penalty"), (None, 1.0)),
    # transformers
    "do_sample": (True,),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (None, 1)),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), (None, 1.0)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), (None, 0.0)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (None, 0)),
    **dict.fromkeys(("min_length", "min_new_tokens"), (None, 0)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ([], None)),
    **dict.fromkeys(("remove_invalid_values", "token_healing", "is_assistant", "use_mtp"), (None, False)),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_scores"), (None, False)),
    **dict.fromkeys(("output_logits", "return_dict_in_generate"), (None, False)),
    **dict.fromkeys(("top_h", "bad_words_ids", "sequence_bias", "watermarking_config", "dola_layers"), (None,)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), (None,)),
    **dict.fromkeys(("constraints", "force_words_ids", "prompt_lookup_num_tokens", "speculation_type"), (None,)),
    **dict.fromkeys(("assistant_early_exit", "assistant_ensemble_weight"), (None,)),
    # vLLM
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (None, 0.0)),
    **dict.fromkeys(("allowed_token_ids", "structured_outputs", "response_format", "logprob_token_ids"), (None,)),
    **dict.fromkeys(("flat_logprobs", "use_beam_search"), (False,)),
    "min_tokens": (None, 0),
    "logit_bias": ({}, None),
    "bad_words": (None, []),
    "thinking_token_budget": (-1, None),
    "logprobs": (0,),  # with more, TRL would read the most probable token's as the sampled one's
    "watermarking": (True, False),
}
_SERVER_SETTINGS = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
# Settings that truncate a distribution without changing the ratios of what they keep, with the value that keeps all.
TRUNCATIONS = {"top_p": 1.0, "top_k": 0, "min_p": None}
# Settings that a vLLM server takes from the model's generation_config where a request omits them (Qwen3's truncates to
# 20 tokens), except temperature, with the value that has no effect.
SERVER_DEFAULTS = {name: _NEUTRAL_VALUES[name][-1] for name in _SERVER_SETTINGS}


def truncations(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of top-p, top-k and min-p that truncate the distribution; `settings` are as in `restrictions`."""
    values = {name: settings[name] for name in TRUNCATIONS if name in settings}
    return {name: value for name, value in values.items() if value not in _NEUTRAL_VALUES[name]}


def truncation_warning(settings: Mapping[str, Any], remedy: str) -> str:
    """Return a warning that the discrepancy contains the truncation of `settings`; `remedy` is what makes it known."""
    named = " and ".join(f"{name}={value!r}" for name, value in truncations(settings).items())
    return (
        f"{named}: the sampler drops tokens, and the rollouts do not say which ones it kept. The probability that it "
        "gives to the others in their place counts as mismatch, and the metrics are called discrepancy_truncated/... "
        f"instead of discrepancy/...: {remedy}; see docs/concepts.md."
    )


def restrictions(settings: Mapping[str, Any], corrected: Collection[str] = ()) -> Iterator[tuple[str, Any, str]]:
    """Yield the settings with which an engine may sample, or report, another distribution than the policy's.

    Args:
        settings: generation settings by name; `temperature` is ignored, because both engines apply it.
        corrected: names of `TRUNCATIONS` that are corrected for.

    Yields:
        Name, value and remedy.
    """
    for name, value in settings.items():
        neutral = _NEUTRAL_VALUES.get(name, ())
        if name in _ANY_VALUE or name == "temperature" or value in neutral:
            continue
        if name in corrected and value is not None:
            continue
        yield name, value, f"set {name}={neutral[-1]!r}" if neutral else f"leave {name} out"
