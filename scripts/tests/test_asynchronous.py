"""`scripts/study/asynchronous.py` with a real server: its transfer of weights as checkpoints, and ages of samples."""

import pytest
import torch
from trl.experimental.async_grpo import async_grpo_trainer, packing

from dc_trl.async_grpo import AsyncDCGRPOConfig
from dc_trl.sampling.replica import Replica
from tests.helpers import SMALL_RUN, TINY_MODEL, distinct_characters, load_script, logged, tiny_model
from tests.vllm_server import complete, requires_vllm


asynchronous = load_script("study/asynchronous")


@requires_vllm
@pytest.mark.filterwarnings("ignore::trl.import_utils.TRLExperimentalWarning")
def test_a_real_server_samples_beside_the_training_and_gets_each_steps_weights(monkeypatch, tmp_path, fp8_server):
    monkeypatch.setattr(packing, "_flash_attn", lambda: asynchronous.Attention)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    tokenizer = asynchronous.tokenizer_of(str(TINY_MODEL))
    sizes = {"per_device_train_batch_size": 8, "max_completion_length": 48, "learning_rate": 1e-3, "token_budget": 0}
    steps = {"max_staleness": 2, "max_steps": 4, "vllm_server_base_url": fp8_server.url, "discrepancy_split": True}
    args = AsyncDCGRPOConfig(str(tmp_path), **SMALL_RUN | sizes | steps)
    transfer = asynchronous.CheckpointTransfer(str(TINY_MODEL), "fp8", fp8_server.url, weight_sync_dir=str(tmp_path))
    trainer = asynchronous.AgesTrainer(
        str(TINY_MODEL),
        distinct_characters,  # which differs within a group, so that every step moves the weights
        args,
        train_dataset=asynchronous.training_problems(0, 64),
        processing_class=tokenizer,
        weight_transfer=transfer,
    )

    def distance_to_the_server():
        """Mean difference of the server's log-probabilities to those of the trainer's weights in FP8."""
        prompt = list(range(40, 52))  # after which the policy is far from sure
        (answer,) = complete(fp8_server.url, [prompt], max_tokens=24, temperature=1.0, seed=0)
        ids = torch.tensor([prompt + answer["ids"]])
        logps = Replica(trainer.model, "fp8").model(input_ids=ids).logits.float().log_softmax(-1)[0, len(prompt) - 1 :]
        return (logps[:-1].gather(1, ids[0, len(prompt) :, None])[:, 0] - torch.tensor(answer["logps"])).abs().mean()

    trainer.train()
    after = distance_to_the_server()
    assert 0 < logged(trainer, "discrepancy/mean")[0] < 0.01
    ages = sum(trainer.ages, start=asynchronous.Counter())
    assert ages.total() == 4 * 8
    assert trainer.ages[0] == {0: 8}
    assert 1 <= max(ages) <= 3  # TRL bounds the age at the queue, a step before the training
    lags = logged(trainer, "discrepancy/lag_k3_kl")
    assert [lag > 0 for lag in lags] == [max(of_step) > 0 for of_step in trainer.ages]
    assert max(lags) > 10 * logged(trainer, "discrepancy/engine_k3_kl")[0]  # what the weights did, not the format
    trainer.model.load_state_dict(tiny_model().state_dict())
    assert distance_to_the_server() > 10 * after
    assert not list(tmp_path.glob("dc_trl-sync-*"))
