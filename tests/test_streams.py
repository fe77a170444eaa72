"""Data sets of every kind that TRL takes: streams, sets by name, and a run that goes on where it stood in them."""

from collections import Counter

import pytest
from datasets import DatasetDict, IterableDataset, IterableDatasetDict

from dc_trl.callbacks.before_and_after import BeforeAndAfter

from . import helpers
from .helpers import assert_same_weights, distinct_characters, logged, make_prompts


def stream(count: int) -> IterableDataset:
    return make_prompts(count).to_iterable_dataset()


class Asked:
    """A reward that keeps the prompts of each generation batch that it scores."""

    __name__ = "asked"

    def __init__(self):
        self.batches = []

    def __call__(self, prompts, completions, **kwargs):
        self.batches.append(prompts)
        return distinct_characters(completions)


def make_trainer(output_dir, train, held_out=None, **fields):
    asked = Asked()
    options = {
        "train_dataset": train,
        "eval_dataset": held_out,
        "deployment_scheme": "bf16",
        "num_generations_eval": 2,
    }
    return helpers.make_trainer(output_dir, None, asked, **options | fields), asked


HELD_OUT = {
    "a stream": lambda: stream(5),
    "streams": lambda: IterableDatasetDict({"easy": stream(5), "hard": stream(3)}),
    "sets": lambda: DatasetDict({"easy": make_prompts(5), "hard": make_prompts(3)}),
    "a set and a stream": lambda: {"easy": make_prompts(5), "hard": stream(3)},
}


@pytest.mark.parametrize("kind", HELD_OUT)
def test_held_out_problems_of_every_kind_are_evaluated_whole(tmp_path, kind):
    held_out = HELD_OUT[kind]()
    sets = held_out if isinstance(held_out, dict) else {"": held_out}
    evaluated = {"eval_steps": 2, "eval_on_start": True, "per_device_eval_batch_size": 4}
    trainer, asked = make_trainer(tmp_path, make_prompts(), held_out, max_steps=2, disable_tqdm=False, **evaluated)
    trainer.train()
    for name in sets:
        assert len(logged(trainer, "_".join(filter(None, ["eval", name, "reward"])))) == 2
    # Two completions of each; the easy set begins with the prompts of the hard one.
    once = Counter({f"{n}+{n}=": 2 * (1 if n > 2 else len(sets)) for n in range(5)})
    scored = Counter(prompt for batch in asked.batches if len(set(batch)) > 1 for prompt in batch)
    scored += Counter(prompt for batch in asked.batches if len(batch) == 2 for prompt in batch)
    assert scored == once + once

    asked.batches.clear()
    trainer.evaluate(held_out)  # given directly
    assert sum(map(Counter, asked.batches), Counter()) == once


def test_a_stream_is_evaluated_as_a_set_of_the_same_rows_is(tmp_path):
    """Greedy completions of the deployed policy, before and after; sampled ones come in another order."""
    measured = {}
    for name, held_out in {"set": make_prompts(5), "stream": stream(5)}.items():
        trainer, _ = make_trainer(tmp_path / name, make_prompts(), held_out, learning_rate=0.0, max_steps=1)
        trainer.add_callback(BeforeAndAfter(trainer))
        trainer.train()
        measured[name] = [logged(trainer, f"eval_greedy_reward{end}") for end in ("", "_se")]
        assert [len(values) for values in measured[name]] == [2, 2]
    assert measured["stream"] == measured["set"]


@pytest.mark.parametrize("rows", [make_prompts, stream])
def test_a_run_resumed_after_its_first_epoch_goes_on_with_the_prompts_that_would_have_come(tmp_path, rows):
    """An epoch of three problems, or of one pair of them, ends with a checkpoint, and one lies within the next."""
    fields = {"max_steps": 5, "save_steps": 1}
    whole, asked = make_trainer(tmp_path, rows(3), **fields)
    whole.train()
    for step in (3, 4):
        resumed, again = make_trainer(tmp_path, rows(3), **fields)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumed.state.global_step == 5
        assert again.batches == asked.batches[len(asked.batches) - len(again.batches) :]
        assert_same_weights(resumed.model, whole.model)


def test_a_run_on_a_stream_that_is_longer_now_goes_on_in_it(tmp_path):
    """`max_steps`, by which transformers counts epochs of a stream, may be another one."""
    fields = {"save_steps": 3, "shuffle_dataset": False}
    first, _ = make_trainer(tmp_path, stream(16), max_steps=3, **fields)
    first.train()
    longer, asked = make_trainer(tmp_path, stream(16), max_steps=6, **fields)
    longer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [batch[0] for batch in asked.batches] == ["3+3=", "4+4=", "5+5="]
