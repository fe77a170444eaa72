"""A pytest plugin for TRL's own tests of its GRPO trainer: no network, and our trainer where it is asked for.

`tests/test_trl_suite.py` runs them in a process of their own, from a checkout of TRL. Nothing of TRL's is in this
repository: the rows of its data set are made by the checkout's own script, and its tiny models, which lie on the Hub,
are stood in for by random ones of the same classes, in a cache of the Hub's form.

Environment:
    TRL_TESTS: a checkout of TRL, with `tests/` and `scripts/`.
    TRL_TESTS_TRAINER: `dc_trl` puts `DCGRPOTrainer` and `DCGRPOConfig` in the place of TRL's; else they are TRL's.
"""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest


os.environ["HF_HUB_CACHE"] = tempfile.mkdtemp(prefix="trl-tests-hub-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import datasets
import torch
import transformers
import trl
from trl import import_utils


HUB = os.environ["HF_HUB_CACHE"]
CHECKOUT = Path(os.environ["TRL_TESTS"])
TOKENIZER = Path(__file__).resolve().parent.parent / "dc_trl" / "assets" / "tiny_qwen3"
OWNER = "trl-internal-testing"
# The models that the tests name, with TRL's chat template of each.
MODELS = {
    "tiny-Cohere2ForCausalLM": "cohere2",
    "tiny-Glm4MoeForCausalLM": "glm4moe",
    "tiny-GptOssForCausalLM": "gptoss",
    "tiny-LlamaForCausalLM-3.2": "llama3_2",
    "tiny-MistralForCausalLM-0.2": None,
    "tiny-Gemma2ForCausalLM": "gemma",
    "tiny-Qwen2ForCausalLM-2.5": "qwen2_5",
    "tiny-Qwen3ForCausalLM": "qwen3",
    "tiny-Qwen3MoeForCausalLM": "qwen3",
    "tiny-Qwen2ForSequenceClassification-2.5": "qwen2_5",
    "tiny-Qwen3ForSequenceClassification": "qwen3",
    "tiny-LlamaForSequenceClassification-3.2": "llama3_2",
}
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
}


def pytest_configure(config):
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name, template in MODELS.items():
        make_model(name, template)
    zen = zen_rows()

    def load_dataset(path, name=None, split=None, streaming=False, **options):
        if path != f"{OWNER}/zen":
            raise ConnectionError(f"{path} is on the Hub, and these tests do not reach it.")
        rows = zen[name] if split is None else zen[name][split]
        return rows.to_iterable_dataset() if streaming else rows

    datasets.load_dataset = load_dataset
    import_utils.__getattr__ = is_available
    if os.environ.get("TRL_TESTS_TRAINER") == "dc_trl":
        import dc_trl

        trl.GRPOTrainer, trl.GRPOConfig = dc_trl.DCGRPOTrainer, dc_trl.DCGRPOConfig


def pytest_unconfigure(config):
    shutil.rmtree(HUB)


def is_available(name: str) -> Callable[[], bool]:
    """`is_joblib_available` and the like, where the checkout asks for one that the installed TRL has not."""
    package = name.removeprefix("is_").removesuffix("_available")
    if name != f"is_{package}_available":
        raise AttributeError(name)
    return lambda: importlib.util.find_spec(package) is not None


def make_model(name: str, template: str | None) -> None:
    """A random model of the class that the name says, where the Hub's client finds what it has fetched."""
    folder = Path(HUB, f"models--{OWNER}--{name}")
    snapshot = folder / "snapshots" / "made-here"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("made-here")
    kind = getattr(transformers, name.split("-")[1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    known = kind.config_class().to_dict().keys()
    config = kind.config_class(
        **{key: value for key, value in SIZES.items() if key in known},
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **({"num_labels": 1} if "SequenceClassification" in name else {}),
    )
    torch.manual_seed(0)
    kind(config).to(torch.bfloat16).save_pretrained(snapshot)
    if template is not None:
        tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text()
    tokenizer.save_pretrained(snapshot)


def zen_rows() -> dict[str, datasets.DatasetDict]:
    """TRL's data set of the tests, by its configurations, as the checkout's script makes it."""
    rows: dict[str, datasets.DatasetDict] = {}
    spec = importlib.util.spec_from_file_location("zen", CHECKOUT / "scripts" / "generate_zen_dataset.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with pytest.MonkeyPatch.context() as patch:
        keep = lambda self, repo_id, config_name: rows.update({config_name: self})  # noqa: E731
        patch.setattr(datasets.DatasetDict, "push_to_hub", keep)
        script.main(test_size=0.1, push_to_hub=True, repo_id="zen")
    return rows
