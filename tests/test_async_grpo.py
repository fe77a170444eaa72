"""AsyncGRPO under the constraint: its loop runs for real, with known rollouts from a queue or beside a vLLM server.

TRL's trainer asks a GPU for its peak FLOPS and for FlashAttention 3, whose definition a CPU has in its place. Losses
are compared with TRL's own trainer and with the formulas, written out.
"""

import copy
import math
import queue
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from dc_trl.async_grpo import AsyncDCGRPOConfig, AsyncDCGRPOTrainer
from dc_trl.constraint.metrics import mismatch_metrics
from dc_trl.run.manifest import checkpoints

from .helpers import (
    PENALTIES,
    SMALL_RUN,
    assert_same_weights,
    corrected_tokens,
    load_script,
    logged,
    make_model,
    make_prompts,
    read_json,
    refuses,
    save,
)


pytestmark = pytest.mark.filterwarnings("ignore::trl.import_utils.TRLExperimentalWarning")

asynchronous = load_script("study/asynchronous")

NEUTRAL = {"constraint": "none", "rollout_correction": "none"}


class Worker:
    """Hands out samples that are known in advance."""

    def __init__(self, samples):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)

    def start(self):
        """Everything is there."""

    stop = start

    def update_model_version(self, model_version):
        """Samples have theirs."""

    def check_health(self, stale_after_s):
        raise AssertionError("the queue is empty")


class NoTransfer:
    """There is no server to send weights to."""

    def init_weight_transfer(self):
        """Nothing to do."""

    pause = resume = destroy = init_weight_transfer

    def send_weights(self, iterator):
        for _ in iterator:
            pass


def make_samples(count):
    """Rollouts of several prompts, to whose tokens the sampler gave 6e-6 to 5e-2 each."""
    samples = []
    for index in range(count):
        rng = random.Random(index)
        prompt = [10 + index // 4, 11, 12]
        completion = [rng.randrange(10, 200) for _ in range(rng.randint(2, 6))]
        logps = [0.0] * 3 + [-rng.uniform(3.0, 12.0) for _ in completion]
        mask = [0] * 3 + [1] * len(completion)
        if index % 3 == 0:
            mask[4] = 0  # a tool wrote this token
        samples.append(
            RolloutSample(
                prompt=[],
                completion=[],
                input_ids=np.array(prompt + completion),
                completion_mask=np.array(mask),
                old_log_probs=np.array(logps, dtype=np.float32),
                advantage=0.0 if index % 5 == 0 else rng.uniform(-1, 1),
                model_version=1,
                group_id=index // 4,
                metrics={"reward": 1.0},
            )
        )
    return samples


@pytest.fixture(scope="module")
def policy(tmp_path_factory, tokenizer):
    return str(save(make_model(), tmp_path_factory.mktemp("policy"), tokenizer))


@pytest.fixture
def make_trainer(monkeypatch, policy, tokenizer, tmp_path):
    monkeypatch.setattr(packing, "_flash_attn", lambda: asynchronous.Attention)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)

    def make(kind=AsyncDCGRPOTrainer, samples=None, peft_config=None, **fields):
        config = AsyncDCGRPOConfig if kind is AsyncDCGRPOTrainer else AsyncGRPOConfig
        usual = {"gradient_accumulation_steps": 2, "token_budget": 0, "max_steps": 2}
        args = config(str(tmp_path / kind.__name__), **SMALL_RUN | usual | fields)
        return kind(
            policy,
            lambda **_: [],
            args,
            train_dataset=make_prompts(),
            processing_class=tokenizer,
            rollout_worker=Worker(samples or make_samples(8 * (args.max_steps + 2))),
            weight_transfer=NoTransfer(),
            peft_config=peft_config,
        )

    return make


# --- a loss by hand


def packed_inputs(trainer, samples):
    """The micro-batch that TRL's collator makes of the samples."""
    row = packing.TreeRow()
    for sample in samples:
        trainer.rollout_queue.versions[sample.group_id] = sample.model_version
        row.add(
            {name: getattr(sample, name) for name in ("input_ids", "completion_mask", "old_log_probs")}
            | {"advantage": sample.advantage, "group_id": sample.group_id, "metrics": sample.metrics}
        )
    collator = async_grpo_trainer.DataCollatorForRollout(trainer.processing_class.pad_token_id)
    return trainer._with_steps(collator, [[row]])


def scored_alone(model, sample):
    """log π of the trained tokens of a sample by a plain forward, and which of its tokens they are."""
    ids, mask = torch.tensor(sample.input_ids), torch.tensor(sample.completion_mask).bool()
    logps = model(input_ids=ids[None]).logits.float().log_softmax(-1)
    return logps[0, :-1].gather(1, ids[1:, None])[mask[1:], 0], mask


def tokens_by_hand(model, samples):
    """log π_train by a plain forward of each sample alone, log π_inf and the advantage, of the trained tokens."""
    plain, weights = make_model(), dict(model.named_parameters())  # with the attention that a CPU has

    def policy(**inputs):  # gradients have to reach the model that is trained
        return torch.func.functional_call(plain, weights, kwargs=inputs)

    found = []
    for sample in samples:
        logps, mask = scored_alone(policy, sample)
        found.append((logps, torch.tensor(sample.old_log_probs)[mask], sample.advantage))
    return found


def loss_by_hand(trainer, samples, penalty=None, kept=None):
    """−min(r·A, clip(r)·A) of the tokens that are kept, plus λ·r·penalty, summed and divided by all tokens."""
    total, count = 0.0, 0
    value = trainer.lagrange_multiplier.value
    for train, infer, advantage in tokens_by_hand(trainer.model, samples):
        r = (train - infer).exp()
        token = -torch.min(r * advantage, r.clamp(1 - 0.2, 1 + 0.2) * advantage)
        if penalty is not None:
            token = token + value * r * penalty(train.detach(), infer)
        if kept is not None:
            token = token * kept(train.detach(), infer, advantage)
        total, count = total + token.sum(), count + len(train)
    return total / count / trainer.current_gradient_accumulation_steps


MASKS = {
    "token_mask": lambda a, b, advantage: ((a - b).exp() <= 2.0).float(),
    "icepop": lambda a, b, advantage: ((a - b).exp().clamp(0.5, 5.0) == (a - b).exp()).float(),
    "geometric_mask": lambda a, b, advantage: ((a - b).mean().exp() <= 1.5).float() * (a - b > -math.inf),
    "tv_mask": lambda a, b, advantage: ((a.exp() - b.exp()) * np.sign(advantage) <= 0.001).float(),
}
CASES = [
    *({"constraint": "static", "constraint_form": form, "lambda_init": 1.0} for form in PENALTIES),
    *({"constraint": "none", "rollout_correction": mask} for mask in MASKS),
    {"constraint": "static", "lambda_init": 1.0, "rollout_correction": "icepop"},
]
BOUNDS = {
    "geometric_mask": {"rollout_correction_max": 1.5, "rollout_correction_min": 0.0},
    "tv_mask": {"rollout_correction_max": 0.001},
}


@pytest.mark.parametrize("fields", CASES, ids=lambda fields: "-".join(map(str, fields.values())))
def test_loss_and_gradient_are_those_of_the_formulas(make_trainer, fields):
    trainer = make_trainer(**fields, **BOUNDS.get(fields.get("rollout_correction"), {}))
    samples = make_samples(6)
    trainer.current_gradient_accumulation_steps = 2
    form = trainer.args.constraint_form if fields["constraint"] != "none" else None
    penalty, kept = PENALTIES.get(form), MASKS.get(fields.get("rollout_correction"))
    expected = loss_by_hand(trainer, samples, penalty, kept)
    wanted = torch.autograd.grad(expected, list(trainer.model.parameters()))
    # What the case is about is there: some tokens are masked and some are kept, and the plain loss is another.
    plain = loss_by_hand(trainer, samples)
    assert (plain - expected).abs() > 1e-4
    loss = trainer.compute_loss(trainer.model, packed_inputs(trainer, samples))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    loss.backward()
    for (name, parameter), gradient in zip(trainer.model.named_parameters(), wanted, strict=True):
        error = (parameter.grad - gradient).abs().max()
        assert error <= 1e-4 * gradient.abs().max() + 1e-6, name


# --- settings


def test_truncated_sampling_has_another_name(make_trainer, caplog):
    trainer = make_trainer(top_p=0.9, **NEUTRAL)
    trainer.train()
    assert len(logged(trainer, "discrepancy_truncated/mean")) == 2
    assert not logged(trainer, "discrepancy/mean")
    assert len([record for record in caplog.records if "top_p=0.9" in record.message]) == 1


# --- a training


def test_without_constraint_the_training_is_trls_bit_for_bit(make_trainer):
    ours, theirs = make_trainer(**NEUTRAL), make_trainer(AsyncGRPOTrainer)
    for trainer in (ours, theirs):
        trainer.train()
    assert ours.state.global_step == theirs.state.global_step == 2
    for name in ("loss", "grad_norm", "ratio", "kl", "clip_ratio/region_mean", "sample/staleness_mean"):
        assert logged(ours, name) == logged(theirs, name), name
        assert logged(ours, name)
    assert_same_weights(ours.model, theirs.model)
    assert not logged(ours, "lagrangian/lambda")
    assert len(logged(ours, "discrepancy/mean")) == 2


def test_metrics_are_those_of_the_tokens_of_each_step(make_trainer):
    trainer = make_trainer(**NEUTRAL)
    trainer.train()
    # The first optimizer step trains on the first two micro-batches of four samples.
    found = tokens_by_hand(make_model(), make_samples(8))
    train, infer = (pad_sequence([tokens[index].detach() for tokens in found], True) for index in (0, 1))
    mask = pad_sequence([torch.ones(len(tokens[0])) for tokens in found], True)
    for name, value in mismatch_metrics(train, infer, mask).items():
        assert logged(trainer, f"discrepancy/{name}")[0] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    gap = (train.exp() - infer.exp()).abs() * mask
    assert logged(trainer, "discrepancy/mean")[0] == pytest.approx((gap.sum(1) / mask.sum(1)).mean().item(), rel=1e-4)


def of_versions(*versions):
    """Groups of four samples, each begun with a version of the weights."""
    samples = make_samples(4 * len(versions))
    for index, sample in enumerate(samples):
        sample.model_version = versions[index // 4]
    return samples


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=4, init_lora_weights=False)], ids=["whole", "adapter"])
def test_the_lag_of_each_sample_is_that_of_the_weights_that_began_it(make_trainer, adapter):
    """By another copy of the model, with the weights of the two steps; one micro-batch has samples of two ages."""
    samples = of_versions(1, 1, 1, 1, 1, 2, 3, 3, 3, 3)
    fields = {"samples": samples, "max_steps": 3, "per_device_train_batch_size": 8, "peft_config": adapter}
    fields |= {"gradient_accumulation_steps": 1, "max_staleness": 4, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(constraint="static", constraint_target="lag", **fields)
    counted, weights = [], {}
    count = trainer.constraint.count
    trainer.constraint.count = lambda constrained: (counted.append(constrained.tokens), count(constrained))[1]
    step = trainer.training_step

    def watched(model, *args):
        weights[trainer.state.global_step] = copy.deepcopy(model.state_dict())
        return step(model, *args)

    trainer.training_step = watched
    trainer.train()
    assert [sorted({*tokens.age.tolist()}) for tokens in counted] == [[0], [1], [1, 2]]
    by_infer_logps = {tuple(sample.old_log_probs[sample.completion_mask > 0].tolist()): sample for sample in samples}
    policy = make_model() if adapter is None else get_peft_model(make_model(), adapter)

    @torch.no_grad()
    def logps(step, sample):
        policy.load_state_dict(weights[step])
        return scored_alone(policy, sample)[0]

    lags = []
    for present, tokens in enumerate(counted):
        for row, scored in enumerate(tokens.scored):
            sample = by_infer_logps[tuple(tokens.infer_logps[row][scored].tolist())]
            age = present - (sample.model_version - 1)
            assert tokens.age[row] == age
            lag = (tokens.train_logps - tokens.lagged_logps)[row][scored]
            expected = logps(present, sample) - logps(present - age, sample)
            torch.testing.assert_close(lag, expected, rtol=0, atol=3e-2)
            lags += lag.abs().tolist() if age else []
            assert age or not lag.any()
    assert max(lags) > 0.3
    # Of the last step, whose samples have two ages.
    last = counted[-1]
    for age in (1, 2):
        d = (last.train_logps - last.lagged_logps)[last.scored & (last.age == age).unsqueeze(1)]
        expected = (d.exp() - d - 1).mean().item()
        assert logged(trainer, f"discrepancy/lag_age{age}_k3_kl")[-1] == pytest.approx(expected, rel=1e-4)
    assert not logged(trainer, "discrepancy/lag_age3_k3_kl")
    lag, engine, whole = (logged(trainer, f"discrepancy/{part}k3_kl") for part in ("lag_", "engine_", ""))
    assert lag[0] == 0
    assert min(lag[1:]) > 1e-3
    assert engine[0] == whole[0]
    assert engine[1] != whole[1]


def test_the_age_is_the_mean_over_the_samples_of_all_micro_batches(make_trainer):
    """Of which a budget of tokens gives some more samples than others."""
    samples = of_versions(1, 1, 1, 2, 2, 1, 2, 3)
    trainer = make_trainer(**NEUTRAL, samples=samples, max_staleness=4, token_budget=24, logging_steps=2)
    counted, count = [], trainer.constraint.count
    trainer.constraint.count = lambda constrained: (counted.append(constrained.tokens.age), count(constrained))[1]
    trainer.train()
    assert len({*map(len, counted)}) > 1
    ages = torch.cat(counted).float()
    assert ages.unique().tolist() == [0.0, 1.0]
    assert logged(trainer, "sync/age") == pytest.approx([ages.mean().item()])


def test_versions_that_do_not_fit_into_memory_are_refused(make_trainer, monkeypatch):
    size = sum(parameter.nbytes for parameter in make_model().parameters())
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4 * size))
    for fields in ({"discrepancy_split": True}, {"constraint": "static", "constraint_target": "lag"}):
        name, value = list(fields.items())[-1]
        with refuses(ValueError, f"{name}={value!r}", "5 versions", "max_staleness=2", "peft_config"):
            make_trainer(max_staleness=2, **fields)
        make_trainer(max_staleness=1, **fields)


def test_the_correction_gets_the_age_of_each_sample(make_trainer):
    """A step has two micro-batches. Of the samples, groups of four have the version of their weights."""
    fields = {"constraint": "none", "rollout_correction": "ppo_clip", "save_strategy": "steps", "save_steps": 2}

    # New weights after two steps, as version 2, and a micro-batch for each group.
    samples = of_versions(1, 1, 1, 1, 1, 2, 2, 1, 2, 2)
    trainer = make_trainer(samples=samples, max_steps=4, weight_sync_steps=2, **fields)
    ages = [tokens.age.tolist() for tokens in corrected_tokens(trainer)]
    assert ages == [[age] * 4 for age in (0, 0, 1, 1, 2, 0, 1, 3)]
    # A run that goes on publishes its weights anew, and samples with them.
    resumed = make_trainer(samples=of_versions(*[1] * 6), max_steps=4, weight_sync_steps=2, **fields)
    checkpoint = f"{trainer.args.output_dir}/checkpoint-2"
    ages = [tokens.age.tolist() for tokens in corrected_tokens(resumed, resume_from_checkpoint=checkpoint)]
    assert ages == [[age] * 4 for age in (0, 0, 1, 1)]
    # New weights after each step, and two groups in a micro-batch, whose samples TRL reorders.
    samples = of_versions(1, 1, 1, 1, 1, 1, 2, 1, 1, 1)
    last = corrected_tokens(make_trainer(samples=samples, max_steps=2, per_device_train_batch_size=8, **fields))[-1]
    found = zip(last.advantages.tolist(), last.age.tolist(), strict=True)
    expected = [(sample.advantage, 2 - sample.model_version) for sample in samples[24:32]]
    for (advantage, age), (own, of_sample) in zip(sorted(found), sorted(expected), strict=True):
        assert (advantage, age) == (pytest.approx(own), of_sample)


def test_the_multiplier_answers_to_each_step_and_is_resumed(make_trainer):
    ascent = {"constraint": "lagrangian", "lambda_lr": 2.0, "discrepancy_tolerance": 0.001}
    fields = ascent | {"save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(max_steps=3, **fields)
    trainer.train()
    values, means = logged(trainer, "lagrangian/lambda"), logged(trainer, "discrepancy/mean")
    assert values[0] == 0.5  # of the log ratio
    for value, mean, after in zip(values, means, [*values[1:], trainer.lagrange_multiplier.value], strict=True):
        assert after == pytest.approx(min(2.0, max(0.0, value + 2.0 * (mean - 0.001))))
    assert len(set(values)) == 3
    checkpoint = f"{trainer.args.output_dir}/checkpoint-2"
    assert read_json(Path(checkpoint, "dc_grpo_state.json"))["lagrange_multiplier"]["value"] == values[2]
    resumed = make_trainer(max_steps=3, **fields)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert logged(resumed, "lagrangian/lambda")[-1] == values[2]
    fields |= {"constraint": "static", "lambda_init": 0.25, "learning_rate": 1e-5}
    other = make_trainer(max_steps=3, **fields)
    other.train(resume_from_checkpoint=checkpoint)
    assert logged(other, "lagrangian/lambda")[-1] == 0.25
    assert logged(other, "learning_rate")[-1] == pytest.approx(1e-5)


def test_a_step_whose_every_token_is_masked_teaches_nothing(make_trainer):
    samples = make_samples(32)
    for sample in samples:
        sample.old_log_probs = np.where(sample.completion_mask > 0, -80.0, 0.0).astype(np.float32)
    trainer = make_trainer(samples=samples, constraint="none", rollout_correction="icepop")
    trainer.train()
    assert logged(trainer, "correction/masked_fraction") == [1.0, 1.0]
    assert_same_weights(trainer.model, make_model())


# --- settings


def test_trls_own_settings_are_refused(tmp_path):
    with refuses(TypeError, "AsyncDCGRPOConfig"):
        AsyncDCGRPOTrainer("model", args=AsyncGRPOConfig(str(tmp_path), use_cpu=True, bf16=False))


def test_what_would_train_nothing_is_refused_as_in_the_other_trainer(tmp_path, policy):
    config = AsyncDCGRPOConfig(str(tmp_path / "run"), use_cpu=True, bf16=False)
    with refuses(ValueError, "train_dataset", "0 rows"):
        AsyncDCGRPOTrainer(policy, [], config, Dataset.from_dict({"prompt": []}), rollout_worker=Worker([]))


# --- what is saved


def test_a_gradient_that_is_not_finite_is_left_out_and_a_damaged_checkpoint_refused(make_trainer):
    saving = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer = make_trainer(**saving)
    weight = next(trainer.model.parameters())
    weight.register_hook(lambda grad: grad * math.nan if trainer.state.global_step == 1 else grad)
    trainer.train()
    folder = Path(trainer.args.output_dir)
    assert [*checkpoints(folder)] == [3]
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    optimizer = folder / "checkpoint-3" / "optimizer.pt"
    damaged = bytearray(optimizer.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    optimizer.write_bytes(damaged)
    with refuses(ValueError, "optimizer.pt", "resume_from_checkpoint"):
        make_trainer(**saving | {"max_steps": 4}).train(resume_from_checkpoint=True)
