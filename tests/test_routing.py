"""Routing replay: the experts that sampled are the experts that are trained."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GenerationConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from dc_trl.constraint.metrics import mismatch_metrics
from dc_trl.parts.routing_replay import OWN_CHOICE, RoutesRecorder, RoutingReplay
from dc_trl.sampling.replica import Replica
from dc_trl.serving.completions import require_rollout
from dc_trl.serving.errors import ServerError

from . import helpers
from .helpers import (
    TORCHRUN,
    at_server,
    logged,
    make_experts,
    make_model,
    make_prompts,
    random_model,
    read_json,
    refuses,
    save,
    succeed,
)
from .routing_worker import mean_gap_at
from .stub_server import completions, stub_server
from .vllm_server import requires_vllm


IDS = torch.arange(10, 34).view(2, 12)
PROMPTS = [[20 + (7 * row + column) % 100 for column in range(5 + row % 8)] for row in range(32)]


def choices(model, forward):
    """The experts that a model uses in a forward pass of two dimensions, as `RoutingReplay.start` takes them."""
    seen = {}
    routers = [(n, m) for n, m in model.named_modules() if type(m).__name__.endswith("Router")]
    hooks = [m.register_forward_hook(lambda _, __, out, n=n: seen.__setitem__(n, out[2])) for n, m in routers]
    output = forward()
    for hook in hooks:
        hook.remove()
    routes = torch.stack([seen[name] for name, _ in routers], 1)
    return output, routes.unflatten(0, output.logits.shape[:2]).to(torch.int16)


def random_routes(batch, tokens, layers=2, k=2):
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(batch, tokens, layers, 8, generator=generator).argsort(-1)
    return order[..., :k].to(torch.int16)


# --- a forward pass at given experts


def mixture(config, layers=3, **fields):
    """A random mixture of eight experts."""
    sizes = {"hidden_size": 32, "num_hidden_layers": layers, "moe_intermediate_size": 32, "head_dim": 16}
    return random_model(config, **sizes | {"num_experts": 8, "num_experts_per_tok": 2} | fields)


FAMILIES = {
    "qwen3": (Qwen3MoeConfig, {}),
    "qwen3, normalised, some layers dense": (Qwen3MoeConfig, {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen2": (Qwen2MoeConfig, {"shared_expert_intermediate_size": 32}),
    "qwen3_next": (
        Qwen3NextConfig,
        {"shared_expert_intermediate_size": 32, "layer_types": ["full_attention"] * 3},
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 8}),
}


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.float32) for family in FAMILIES), ("qwen3", torch.bfloat16)]
)
def test_replaying_its_own_choice_is_the_plain_forward_bit_for_bit(family, dtype):
    torch.manual_seed(0)
    config, fields = FAMILIES[family]
    model = mixture(config, **fields).to(dtype)
    ids = torch.randint(10, 200, (3, 9))
    plain, routes = choices(model, lambda: model(input_ids=ids))
    plain.logits.square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    replay = RoutingReplay(model)
    assert replay.layers == ([0, 2] if "dense" in family else [0, 1, 2])
    for replayed in (routes, torch.full_like(routes, OWN_CHOICE)):
        replay.start(replayed)
        output = model(input_ids=ids)
        assert torch.equal(output.logits, plain.logits)
        output.logits.square().mean().backward()
        assert replay.counts().tolist() == [27 if replayed is routes else 0, 0]
        for name, gradient in gradients.items():
            assert torch.equal(model.get_parameter(name).grad, gradient), name
        model.zero_grad()


def test_a_forward_at_foreign_experts_by_hand():
    """Token by token and expert by expert; where no expert is given, the two best."""
    model = make_experts(32)
    routes = random_routes(1, 6)
    routes[0, 4] = OWN_CHOICE
    block = model.model.layers[1].mlp
    replay = RoutingReplay(model)
    replay.start(routes)
    seen = {}
    block.register_forward_hook(lambda _, args, output: seen.update(read=args[0][0], wrote=output[0]))
    with torch.no_grad():
        model(input_ids=torch.tensor([[20, 21, 22, 23, 24, 25]]))
        for position, (token, wrote) in enumerate(zip(seen["read"], seen["wrote"], strict=True)):
            scores = block.gate.weight @ token
            chosen = scores.topk(2).indices if position == 4 else routes[0, position, 1].long()
            expected = torch.zeros(32)
            for weight, expert in zip(scores[chosen].softmax(-1), chosen, strict=True):
                gate, up = (block.experts.gate_up_proj[expert] @ token).chunk(2)
                expected += weight * (block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
            torch.testing.assert_close(wrote, expected)
    known, flipped = replay.counts().tolist()
    assert known == 5
    assert 0 < flipped <= 5


def test_a_token_is_flipped_where_one_layer_would_choose_otherwise():
    """By the choice of each router itself, which a hook reads before the replay's."""
    model, routes = make_experts(32), random_routes(2, 12)
    routes[:, ::2, 1] = OWN_CHOICE  # in the second layer the trainer chooses for every other token
    own = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: own.append(output[2]))
    replay = RoutingReplay(model)
    replay.start(routes)
    with torch.no_grad():
        model(input_ids=IDS)
    known = routes.flatten(0, 1)
    expected = sum(
        any(
            row[layer, 0] != OWN_CHOICE and set(row[layer].tolist()) != set(own[layer][token].tolist())
            for layer in (0, 1)
        )
        for token, row in enumerate(known)
    )
    assert replay.counts().tolist() == [24, expected]
    assert expected > 12


def test_the_gradient_reaches_the_router():
    """Against finite differences along a random direction: at given experts the policy is smooth."""
    model = make_experts(32).double()
    model.set_experts_implementation("eager")  # torch has the other one in no double precision
    routes = random_routes(2, 12)
    replay = RoutingReplay(model)
    replay.start(routes)

    def log_probability():
        return model(input_ids=IDS).logits.log_softmax(-1)[..., 20].sum()

    log_probability().backward()
    for layer in model.model.layers:
        weight = layer.mlp.gate.weight
        direction = torch.randn(weight.shape, dtype=torch.double, generator=torch.Generator().manual_seed(1))
        slope = (weight.grad * direction).sum().item()
        ends = []
        with torch.no_grad():
            for step in (1e-4, -2e-4):
                weight += step * direction
                ends.append(log_probability().item())
            weight += 1e-4 * direction
        assert abs(slope) > 1e-3
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_computes_the_same_again(reentrant):
    routes = random_routes(2, 12)
    gradients = []
    for checkpointing in (False, True):
        model = make_experts(32).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        replay = RoutingReplay(model)
        for step in range(2):  # two micro-batches that accumulate
            replay.start(routes.roll(step, 0))
            model(input_ids=IDS.roll(step, 0)).logits.log_softmax(-1)[..., 20].mean().backward()
        replay.stop()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_a_batch_may_be_read_in_parts():
    model = make_experts(32)
    ids, routes = torch.arange(10, 70).view(5, 12), random_routes(5, 12)
    replay = RoutingReplay(model)
    replay.start(routes)
    with torch.no_grad():
        for _ in range(2):  # and again
            whole = model(input_ids=ids).logits
            parts = torch.cat([model(input_ids=part).logits for part in ids.split(2)])
            torch.testing.assert_close(parts, whole)
    with refuses(RuntimeError, "24 tokens", "0 of 60"):
        model(input_ids=ids[:2])
    with torch.no_grad(), refuses(RuntimeError, "72 tokens"):
        model(input_ids=torch.arange(10, 82).view(6, 12))
    replay.stop()
    model(input_ids=ids[:2])


def test_the_auxiliary_loss_is_of_the_routers_own_scores():
    """The first layer reads the same whatever it replays, so that its loss is the same."""
    torch.manual_seed(0)
    model = mixture(Qwen3MoeConfig, layers=1, num_experts_per_tok=8)
    plain = model(input_ids=IDS, output_router_logits=True)
    replay = RoutingReplay(model)
    replay.start(random_routes(2, 12, layers=1, k=8))
    assert torch.equal(model(input_ids=IDS, output_router_logits=True).aux_loss, plain.aux_loss)
    replay.start(random_routes(2, 12, layers=1, k=2).repeat(1, 1, 1, 4))
    replayed = model(input_ids=IDS, output_router_logits=True)
    assert torch.equal(replayed.aux_loss, plain.aux_loss)
    assert not torch.equal(replayed.logits, plain.logits)


def test_a_trained_copy_of_a_router_is_replayed_too():
    base = make_experts(32)
    policy = get_peft_model(base, LoraConfig(target_modules=["q_proj"], modules_to_save=["gate"], r=2))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "modules_to_save" in name or "lora_B" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    routes = random_routes(2, 12)
    replay = RoutingReplay(policy)
    assert replay.layers == [0, 1]
    replay.start(routes)
    adapted = policy(input_ids=IDS).logits
    adapted.log_softmax(-1)[..., 20].mean().backward()
    trained = [parameter for name, parameter in policy.named_parameters() if "modules_to_save" in name]
    assert len(trained) == 2
    assert all(parameter.grad.abs().max() > 0 for parameter in trained)
    replay.stop()
    merged = policy.merge_and_unload()
    replay = RoutingReplay(merged)
    replay.start(routes)
    torch.testing.assert_close(merged(input_ids=IDS).logits, adapted)


# --- the engine's choice


def generate(replica, recorder, length=16):
    sampling = GenerationConfig(
        max_new_tokens=length, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=[1, *range(200, 208)]
    )
    with recorder.recording(len(PROMPTS)):
        completion_ids, logps = replica.generate(PROMPTS, sampling, 1.0)
    return completion_ids, logps, recorder.routes(PROMPTS, completion_ids)


def test_the_replica_says_what_it_chose():
    """Against one forward pass over each sequence, without padding. Float32 leaves no choice to rounding."""
    torch.manual_seed(0)
    replica = Replica(make_experts(), "bf16")
    replica.model.float()
    completion_ids, _, routes = generate(replica, RoutesRecorder(replica.model))
    assert len(set(map(len, completion_ids))) > 5
    for prompt, completion, recorded in zip(PROMPTS, completion_ids, routes, strict=True):
        ids = torch.tensor([[*prompt, *completion][:-1]])
        with torch.no_grad():
            _, expected = choices(replica.model, lambda ids=ids: replica.model(input_ids=ids))
        assert torch.equal(recorded, expected[0])


@pytest.mark.parametrize("scheme", ["bf16", "fp8"])
def test_replay_removes_flips_and_most_of_the_mismatch(scheme):
    torch.manual_seed(0)
    policy = make_experts()
    replica = Replica(policy, scheme)
    completion_ids, logps, routes = generate(replica, RoutesRecorder(replica.model), length=32)
    replay = RoutingReplay(policy)
    kl, flips = [], []
    for replayed in (False, True):
        rows, flipped = [], 0
        for prompt, completion, route in zip(PROMPTS, completion_ids, routes, strict=True):
            ids = torch.tensor([[*prompt, *completion][:-1]])
            if replayed:
                replay.start(route.unsqueeze(0))
            with torch.no_grad():
                output, used = choices(policy, lambda ids=ids: policy(input_ids=ids))
            replay.stop()
            flipped += (used[0].sort(-1).values != route.sort(-1).values).flatten(1).any(1).sum().item()
            scored = output.logits[0, len(prompt) - 1 :].log_softmax(-1)
            rows.append(scored.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1))
        train, infer = torch.cat(rows), torch.tensor([value for values in logps for value in values])
        kl.append(mismatch_metrics(train[None], infer[None], torch.ones(1, len(train)))["k3_kl"])
        flips.append(flipped / sum(map(len, routes)))
    assert flips[0] > (0.005 if scheme == "bf16" else 0.05)
    assert flips[1] == 0
    assert kl[1] < kl[0] / 2


# --- training


def make_trainer(tmp_path, model=None, **fields):
    fields = {"deployment_scheme": "fp8", "routing_replay": True, "eval_dataset": make_prompts(4)} | fields
    return helpers.make_trainer(tmp_path, model or make_experts(), **fields)


@pytest.mark.parametrize("route", ["loss", "old log-probs"])
def test_training_takes_the_engines_experts(tmp_path, route):
    """Both ways to log π_train; no learning rate, so that both runs have the same rollouts."""
    fields = {"learning_rate": 0.0, "max_steps": 4, "per_device_train_batch_size": 8}
    fields |= {"eval_steps": 4, "pad_to_multiple_of": 8, "gradient_checkpointing": True}
    fields |= {"num_iterations": 2} if route == "old log-probs" else {}
    runs = []
    for replay in (False, True):
        trainer = make_trainer(tmp_path, routing_replay=replay, **fields)
        trainer.train()
        runs.append(trainer)
    plain, replayed = (sum(logged(trainer, "discrepancy/k3_kl")) for trainer in runs)
    assert replayed < plain / 2
    assert logged(runs[1], "eval_discrepancy/k3_kl")[0] < logged(runs[0], "eval_discrepancy/k3_kl")[0]
    assert not logged(runs[0], "routing/flipped_fraction")
    assert all(0.05 < value < 0.4 for value in logged(runs[1], "routing/flipped_fraction"))
    # 8 completions of 8 tokens after prompts of 4 or 6 ("10+10="): all but the last token of each.
    assert all(11 / 12 <= value <= 13 / 14 for value in logged(runs[1], "routing/replayed_fraction"))
    assert logged(runs[1], "eval_routing/flipped_fraction")
    if route == "loss":  # a further forward, to measure, is not counted
        split = make_trainer(tmp_path, discrepancy_split=True, **fields)
        split.train()
        assert logged(split, "routing/flipped_fraction") == logged(runs[1], "routing/flipped_fraction")


def test_it_works_together_with_the_deployed_forward(tmp_path):
    """Which is the replica's own, so that nothing is left to replay, and replay changes nothing.

    The model's directory says `use_cache: false`, as transformers writes it after a training.
    """
    model = make_experts()
    model.config.use_cache = False
    folder = save(model, tmp_path / "model")
    (folder / "generation_config.json").unlink()
    fields = {"learning_rate": 0.0, "max_steps": 2, "train_through_quantization": True, "gradient_checkpointing": True}
    runs = []
    for replay in (False, True):  # one after the other: a trainer seeds what samples when it is built
        runs.append(make_trainer(tmp_path, routing_replay=replay, model=str(folder), **fields))
        runs[-1].train()
    assert max(logged(runs[1], "discrepancy/k3_kl")) < 1e-6
    assert logged(runs[1], "routing/flipped_fraction") == [0.0, 0.0]
    assert logged(runs[1], "grad_norm") == pytest.approx(logged(runs[0], "grad_norm"), rel=1e-3)


def test_a_reference_model_is_compared_at_the_same_experts(tmp_path):
    """Without a step, the policy is its reference, and KL is 0 to the last bit."""
    trainer = make_trainer(
        tmp_path, beta=0.1, learning_rate=0.0, max_steps=2, model=str(save(make_experts(), tmp_path / "model"))
    )
    assert trainer.ref_model is not None
    trainer.train()
    assert logged(trainer, "kl") == [0.0, 0.0]


@pytest.mark.long
def test_two_processes(tmp_path):
    """DDP, and FSDP2 with recomputed layers against the whole model."""
    succeed([*TORCHRUN, "-m", "tests.routing_worker", str(tmp_path)])
    whole, sharded = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "sharded"))
    for name, value in whole.items():
        torch.testing.assert_close(sharded[name], value, rtol=1e-4, atol=1e-6)
    logs = [read_json(tmp_path / f"logs-{rank}.json") for rank in range(2)]
    assert logs[0] == logs[1]
    plain, replayed = logs[0]["False"], logs[0]["True"]
    assert replayed["discrepancy/k3_kl"][0] < 0.75 * plain["discrepancy/k3_kl"][0]
    # 8 sequences of 12 tokens, of each of which the last one has no route.
    assert replayed["routing/replayed_fraction"] == pytest.approx([11 / 12] * 2)
    assert all(0 < value < 0.4 for value in replayed["routing/flipped_fraction"])


# --- what is refused


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (make_model, "Qwen3ForCausalLM"),
        (lambda: mixture(GptOssConfig, num_local_experts=4), "GptOssForCausalLM"),
        (lambda: mixture(GraniteMoeConfig, num_local_experts=4), "GraniteMoe"),
    ],
    ids=["dense", "gpt_oss", "granite"],
)
def test_a_model_without_such_a_router_is_refused(tmp_path, make, name):
    with refuses(ValueError, "routing_replay=True", name, "router", "set routing_replay=False"):
        make_trainer(tmp_path, make(), deployment_scheme="bf16")


# --- a vLLM server


def served(url, tmp_path, **fields):
    return make_trainer(tmp_path, **at_server(url) | {"max_steps": 1, "vllm_max_retries": 0} | fields)


def test_a_server_that_returns_no_routes_is_refused_when_the_trainer_is_built(tmp_path):
    with stub_server() as server:
        with refuses(ServerError, "routing_replay=True", "--enable-return-routed-exp"):
            served(server.url, tmp_path)
        served(server.url, tmp_path, routing_replay=False)


def test_the_routes_of_a_server_are_replayed(tmp_path):
    routes = random_routes(4, 11).numpy().astype(np.uint8)
    with stub_server() as server:
        server.routes = True
        trainer = served(server.url, tmp_path)
        tokens = [[40, 41, 42, 43, 44, 45, 46, 1]] * 4
        server.completes = lambda body: completions(body["prompt"] * 4, tokens, routes)
        trainer.train()
    given = torch.cat([torch.tensor(routes.astype(np.int16)), torch.full((4, 1, 2, 2), OWN_CHOICE)], 1)
    gap = mean_gap_at(given, server.bodies[0]["prompt"] * 4, tokens)
    assert logged(trainer, "discrepancy/mean") == pytest.approx([gap], rel=1e-4)
    own = mean_gap_at(torch.full_like(given, OWN_CHOICE), server.bodies[0]["prompt"] * 4, tokens)
    assert own != pytest.approx(gap, rel=1e-3)
    assert logged(trainer, "routing/replayed_fraction") == pytest.approx([11 / 12])


@requires_vllm
def test_vllms_own_encoding_is_read():
    from vllm.utils.serial_utils import numpy2base64

    routes = random_routes(1, 5).numpy().astype(np.uint16)[0]
    tokens = list(range(len(routes) - 1))
    choice = {"index": 0, "token_ids": tokens, "finish_reason": "stop", "routed_experts": numpy2base64(routes)}
    request = {"prompt": [[7, 8]], "n": 1, "max_tokens": 99}
    (read,) = require_rollout(request, {"choices": [choice]}, "here")
    assert np.array_equal(read["routed_experts"], routes)
