"""Parts: those that are off are not there, and one of a user's own needs no edit of the package."""

import re
import sys

import pytest
import torch

from dc_trl import DCGRPOTrainer
from dc_trl.parts.part import Part
from dc_trl.run.manifest import STATE_FILE
from dc_trl.sampled_tokens import loss_mask

from .helpers import (
    MISALIGNED,
    ROOT,
    Rollouts,
    Watch,
    completion_logps,
    logged,
    make_model,
    make_tokenizer,
    make_trainer,
    read_json,
    succeed,
)


PARTS = {path.stem for path in (ROOT / "dc_trl" / "parts").glob("*.py")} - {"__init__", "part"}


@pytest.mark.long
def test_what_is_off_is_not_imported(tmp_path):
    """In a fresh interpreter; with a setting for each of the others, they are."""
    code = (
        "import sys; from tests.helpers import make_trainer\n"
        "settings = {'length_aware_batches': False, 'deployment_scheme': 'fp8'} | eval(sys.argv[1])\n"
        "make_trainer(sys.argv[2], **settings).train()\n"
        "print('PARTS', *sorted(n.rpartition('.')[2] for n in sys.modules if n.startswith('dc_trl.parts.')))"
    )

    def imported(settings):
        process = succeed([sys.executable, "-c", code, repr(settings | {"max_steps": 1}), str(tmp_path)], cwd=ROOT)
        (line,) = re.findall("^PARTS (.*)$", process.stdout, re.MULTILINE)
        return set(line.split()) - {"part"}

    assert imported({"deployment_scheme": None, "constraint": "none"}) == set()
    assert imported({}) == {"two_engines"}
    everything = {
        "train_through_quantization": True,
        "drop_zero_std_groups": True,
        "length_aware_batches": True,
        "discrepancy_split": True,
        "weight_sync_steps": 2,
        "top_p": 0.9,
        "score_centering": True,
    }
    assert imported(everything) == PARTS - {"routing_replay"}


def test_a_batch_has_no_column_of_a_part_that_is_off(tmp_path, seen_by_the_loss):
    make_trainer(tmp_path, deployment_scheme="fp8", length_aware_batches=False, max_steps=1).train()
    of_trl = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"}
    assert seen_by_the_loss[0].keys() == of_trl | {"sampling_per_token_logps"}


def test_the_part_of_the_page_is_one(tmp_path, seen_by_the_loss):
    """The example of docs/CONTRIBUTING.md, for two of three steps."""
    page = (ROOT / "docs" / "CONTRIBUTING.md").read_text()
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "(Part)" in block)
    scope = {}
    exec(block, scope)
    trainer = make_trainer(tmp_path, rollout_func=Rollouts(), constraint="static", max_steps=3)
    trainer.parts.append(scope["LateTokens"](trainer))
    trainer.parts[-1].until = 2
    watch = Watch(trainer)
    trainer.train()
    left = [loss_mask(batch)[:, :2].sum().item() for batch in seen_by_the_loss]
    half = len(left) * 2 // 3
    assert left[:half] == [0] * half
    assert all(count > 0 for count in left[half:])
    assert logged(trainer, "late_tokens/left")[0] == loss_mask(seen_by_the_loss[0]).sum().item()
    # The others are scored with all tokens before them.
    batch, (_, tokens) = seen_by_the_loss[0], watch.tokens[0]
    whole = {"completion_mask": (batch["completion_ids"] != make_tokenizer().pad_token_id).long()}
    torch.testing.assert_close(
        tokens.train_logps[tokens.scored], completion_logps(make_model(), batch | whole)[tokens.scored]
    )


class Counter(Part):
    """Counts the forwards of the policy in the loss, over all sessions of a run."""

    count = 0

    def scored(self, scores, inputs, *tokens):
        self.count += 1
        return scores

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_a_part_is_resumed(tmp_path):
    fields = {"rollout_func": Rollouts(), "max_steps": 4, "save_steps": 2}
    trainer = make_trainer(tmp_path, **fields)
    trainer.parts.append(Counter(trainer))
    trainer.train()
    whole = trainer.parts[-1].count
    assert read_json(tmp_path / "checkpoint-2" / STATE_FILE)["parts"]["Counter"] == {"count": whole // 2}
    resumed = make_trainer(tmp_path, **fields)
    resumed.parts.append(Counter(resumed))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.parts[-1].count == whole


class Order(Part):
    """Notes where it is called."""

    def __init__(self, trainer, name, calls):
        super().__init__(trainer)
        self.name, self.calls = name, calls

    def loss(self, compute, inputs):
        self.calls.append(f"{self.name} before")
        loss = compute(inputs)
        self.calls.append(f"{self.name} after")
        return loss


def test_the_later_part_is_outside(tmp_path):
    trainer = make_trainer(tmp_path, rollout_func=Rollouts(), max_steps=1, gradient_accumulation_steps=1)
    calls = []
    trainer.parts += [Order(trainer, "first", calls), Order(trainer, "second", calls)]
    trainer.train()
    assert calls == ["second before", "first before", "first after", "second after"]


@pytest.mark.parametrize("steps", [{"gradient_accumulation_steps": 2}, MISALIGNED])
@pytest.mark.parametrize("name", ["own/ratio", "ratio_max", "ratio_k3"])
def test_a_form_of_the_users_own_logs_what_it_says(tmp_path, name, steps):
    """The mean over the scored tokens of the whole generation batch, of micro-batches of different lengths."""
    trainer = make_trainer(tmp_path, rollout_func=Rollouts(), constraint="static", max_steps=1, **steps)
    form, seen = trainer.constraint.form, []

    def own(tokens):
        tokens.metrics[name] = (tokens.train_logps - tokens.infer_logps).exp()
        seen.append(tokens)
        return form(tokens)

    trainer.constraint.form = own
    trainer.train()
    ratios = torch.cat([(tokens.train_logps - tokens.infer_logps).exp()[tokens.scored] for tokens in seen])
    assert logged(trainer, name)[0] == pytest.approx(ratios.mean().item())
    assert isinstance(trainer, DCGRPOTrainer)
