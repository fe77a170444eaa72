"""Which settings of generation leave the sampled distribution the policy's.

A constraint compares the engine's log-probability of a token with that of the whole policy at one temperature. What
truncates, bends or restricts the engine's distribution, or has it report other numbers, would be constrained as if it
were mismatch. So settings that cannot do that are listed here, and whatever is not listed counts as restricting.

The names are those of transformers' `GenerationConfig` (5.17) and of vLLM's `SamplingParams` and completion requests
(0.31): `generation_kwargs` go to one or the other, whichever samples.
"""

from collections.abc import Iterator, Mapping
from typing import Any


# What a vLLM server takes from the model's generation_config where a request leaves it open, temperature apart.
SERVER_DEFAULTS = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")

# When a completion ends, how it is computed, what is seen of it: any value.
_ANY_VALUE = frozenset(
    {
        # transformers
        *("max_new_tokens", "max_length", "max_time", "stop_strings"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory"),
        *("compile_config", "disable_compile", "prefill_chunk_size"),
        "renormalize_logits",  # log-softmax, of which the softmax is the same
        *("early_stopping", "length_penalty"),  # of beams, which are refused
        # Of assisted generation, likewise.
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind"),
        *("decoder_start_token_id", "continuous_batching_config", "transformers_version"),
        # vLLM
        *("max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "repetition_detection", "seed"),
        "ignore_eos",  # decides when to stop; min_tokens is what keeps end tokens from being sampled
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
        *("priority", "user", "session_id", "cache_salt", "skip_reading_prefix_cache"),
    }
)

# Values that change nothing; the last one is what to set.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    # both
    "top_p": (None, 1.0),
    "top_k": (-1, 0),  # None is transformers' default of 50, or the model's own
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    # transformers
    "do_sample": (True,),
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "diversity_penalty": (None, 0.0),
    "penalty_alpha": (None, 0.0),
    "guidance_scale": (None, 1.0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "bad_words_ids": (None,),
    "sequence_bias": (None,),
    "suppress_tokens": ([], None),
    "begin_suppress_tokens": ([], None),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "remove_invalid_values": (None, False),
    "watermarking_config": (None,),
    "token_healing": (None, False),
    "constraints": (None,),
    "force_words_ids": (None,),
    "dola_layers": (None,),
    "is_assistant": (None, False),
    "use_mtp": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "assistant_ensemble_weight": (None,),
    "speculation_type": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "return_dict_in_generate": (None, False),
    # vLLM
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "min_tokens": (None, 0),
    "logit_bias": ({}, None),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "structured_outputs": (None,),
    "response_format": (None,),
    "thinking_token_budget": (-1, None),
    "logprobs": (0,),  # more: TRL would take the most probable token's for the sampled one's
    "logprob_token_ids": (None,),
    "flat_logprobs": (False,),
    "use_beam_search": (False,),
    "watermarking": (True, False),
}


def restrictions(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Settings that may make the engine sample, or report, another distribution than the policy's.

    Args:
        settings: generation settings by name; `temperature` apart, which both engines apply.

    Yields:
        (name, value, what to do instead of setting this value).
    """
    for name, value in settings.items():
        neutral = _NEUTRAL_VALUES.get(name, ())
        if name in _ANY_VALUE or name == "temperature" or value in neutral:
            continue
        yield name, value, f"set {name}={neutral[-1]!r}" if neutral else f"leave {name} out"
