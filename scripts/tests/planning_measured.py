"""What the plan says of memory, beside what is measured: `python -m scripts.tests.planning_measured` prints it."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TrainerCallback

from dc_trl.records.tables import print_table
from tests.helpers import ROOT, load_script, make_prompts, make_tokenizer, make_trainer, tiny_model


plan = load_script("plan")


class Row(NamedTuple):
    """A number that was predicted, and the same measured."""

    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def small_model() -> PreTrainedModel:
    """A random model of the shape of Qwen3-0.6B."""
    config = AutoConfig.from_pretrained(ROOT / "configs" / "models" / "qwen3_0_6b.json")
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def activation_row(model: PreTrainedModel, batch: int, tokens: int, dtype: torch.dtype) -> Row:
    """Bytes that autograd keeps for the layers of a model and the norm behind them. Afterwards it has this dtype."""
    model.to(dtype)
    held: dict[int, int] = {}
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # so that no other storage takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(torch.zeros(batch, tokens, dtype=torch.long), use_cache=False)
    sizes, element = plan.architecture_of(model.config, ""), dtype.itemsize
    predicted = sizes.layers * plan.layer_activations(sizes, element) + plan.last_norm_activations(sizes, element)
    return Row(f"bytes of activations, {dtype}", predicted * batch * tokens, sum(held.values()))


def _resident(key: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[key].split()[0]) * 1024


class PeakMemory(TrainerCallback):
    """The most bytes that were resident in an optimizer step, as Linux counts them."""

    bytes = 0

    def on_step_begin(self, *args, **kwargs):
        Path("/proc/self/clear_refs").write_text("5")

    def on_step_end(self, *args, **kwargs):
        self.bytes = max(self.bytes, _resident("VmHWM"))


def peak_row(make: Callable[[], PreTrainedModel], batch: int, length: int, steps: int) -> Row:
    """Peak of real optimizer steps on completions of one length, in float32 on the CPU; Linux alone says it."""
    before, peak, tokenizer = _resident("VmRSS"), PeakMemory(), make_tokenizer()
    prompts = make_prompts(batch)
    ids = {prompt: tokenizer(prompt)["input_ids"] for prompt in prompts["prompt"]}

    def replay(texts, trainer):
        completions = torch.randint(10, 200, (len(texts), length), generator=torch.Generator().manual_seed(0))
        return {
            "prompt_ids": [ids[text] for text in texts],
            "completion_ids": completions.tolist(),
            "logprobs": [[-4.0] * length] * len(texts),
        }

    with tempfile.TemporaryDirectory() as folder:
        options = {"max_steps": steps, "max_completion_length": length, "per_device_train_batch_size": batch}
        options |= {"constraint": "none", "learning_rate": 1e-6, "rollout_func": replay, "callbacks": [peak]}
        reward = lambda completions, **kwargs: [float(index % 3) for index in range(len(completions))]  # noqa: E731
        trainer = make_trainer(folder, make(), reward, train_dataset=prompts, **options)
        trainer.train()
    sizes, longest = plan.architecture_of(trainer.model.config, ""), max(map(len, ids.values()))
    work = plan.Work(batch, 1, longest, length, checkpointing="false", precision="float32")
    return Row("peak bytes of a step", plan.trainer_memory(sizes, "ddp", 1, work).total, peak.bytes - before)


def main() -> None:
    models = {"tiny model": (tiny_model, 64, 128, 6), "random 0.6B": (small_model, 4, 48, 3)}
    for name, (make, batch, length, steps) in models.items():
        model = make()
        rows = [Row("parameters", plan.architecture_of(model.config, "").parameters, model.num_parameters())]
        rows += [activation_row(model, 2, 64, dtype) for dtype in (torch.float32, torch.bfloat16)]
        del model
        free = psutil.virtual_memory().available / 1e9
        if sys.platform == "linux" and (name == "tiny model" or free > 14):
            rows.append(peak_row(make, batch, length, steps))
        cells = [[row.what, f"{row.predicted:,.0f}", f"{row.measured:,.0f}", f"{row.error:+.3%}"] for row in rows]
        print_table(["", "predicted", "measured", "error"], cells, name)


if __name__ == "__main__":
    main()
