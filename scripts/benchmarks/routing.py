"""What routing replay removes of the mismatch of random mixtures of experts."""

import argparse

import torch
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from dc_trl.constraint.metrics import mismatch_metrics
from dc_trl.parts.routing_replay import RoutesRecorder, RoutingReplay, batch_routes
from dc_trl.records.tables import print_table
from dc_trl.sampling.replica import Replica


def tiny_experts(seed: int) -> Qwen3MoeForCausalLM:
    """A random mixture: 4 layers of 16 experts, of which a token takes 2."""
    torch.manual_seed(seed)
    width, shape = 64, {"num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 2, "norm_topk_prob": True}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": width // 2}
    sizes = {"hidden_size": width, "intermediate_size": width, "moe_intermediate_size": width, "vocab_size": 262}
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    # Wide, so that probabilities differ.
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **shape, **heads, **tokens, initializer_range=0.1)).eval()


@torch.no_grad()
def replayed(policy: Qwen3MoeForCausalLM, scheme: str, batch_size: int, length: int) -> list[dict[str, float]]:
    """KL (k3), mean |Δp| and share of tokens with a flipped expert, without and with replay of the same rollouts."""
    engine = Replica(policy, scheme)
    # The last one sees what the policy uses, replayed or not.
    of_engine, replay, of_policy = RoutesRecorder(engine.model), RoutingReplay(policy), RoutesRecorder(policy)
    prompts = [[20 + (7 * row + column) % 100 for column in range(5 + row % 8)] for row in range(batch_size)]
    size = {"min_new_tokens": length, "max_new_tokens": length}
    config = GenerationConfig(**size, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=[1], disable_compile=True)
    with of_engine.recording(batch_size):
        completions, logps = engine.generate(prompts, config, 1.0)
    routes = of_engine.routes(prompts, completions)
    width = max(map(len, prompts))
    input_ids = torch.zeros(batch_size, width + length, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt + completion)
        attention_mask[row, width - len(prompt) :] = 1
    figures = []
    for replaying in (False, True):
        if replaying:
            replay.start(batch_routes(routes, prompts, completions, None))
        with of_policy.recording(batch_size):
            logits = policy(input_ids=input_ids, attention_mask=attention_mask).logits[:, width - 1 : -1]
        scored = logits.log_softmax(-1).gather(2, input_ids[:, width:, None]).squeeze(2)
        metrics = mismatch_metrics(scored, torch.tensor(logps), torch.ones_like(scored))
        pairs = zip(routes, of_policy.routes(prompts, completions), strict=True)
        flipped = torch.cat([(a.sort(-1).values != b.sort(-1).values).flatten(1).any(1) for a, b in pairs])
        figures.append(
            {"k3": metrics["k3_kl"], "p": metrics["probs_diff_mean"], "flipped": flipped.float().mean().item()}
        )
    replay.stop()
    return figures


def routing(args: argparse.Namespace) -> None:
    rows = []
    for scheme in ("fp8", "bf16"):
        seeds = [
            replayed(tiny_experts(seed), scheme, args.batch_size, args.completion_length) for seed in range(args.seeds)
        ]
        for replaying, name in enumerate(("no", "yes")):
            cells = []
            for figure, digits in (("k3", ".1e"), ("p", ".1e"), ("flipped", ".1%")):
                values = [of_seed[replaying][figure] for of_seed in seeds]
                cells.append(" ".join(format(value, digits) for value in values))
            rows.append([scheme, name, *cells])
    title = f"{args.batch_size} rollouts of {args.completion_length} tokens, one figure for each of {args.seeds} seeds"
    print_table(["replica", "replay", "KL (k3), nats", "mean |Δp|", "tokens with a flipped expert"], rows, title)
