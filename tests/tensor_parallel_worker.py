"""Loads checkpoints as two ranks of vLLM on a Hopper GPU would: `-m tests.tensor_parallel_worker FOLDER …`.

The platform is faked and no kernel runs. vLLM builds the layers, its own loaders cut the weights, and what a rank then
holds is written to `rank0.pt` or `rank1.pt`, into the folder of the checkpoint.
"""

import sys
import tempfile
from pathlib import Path

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tp_group, init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model

from .helpers import load_script


def main() -> None:
    torch.set_default_dtype(torch.bfloat16)
    options = {"dtype": "bfloat16", "max_model_len": 64, "enforce_eager": True}
    configs = {folder: EngineArgs(model=folder, **options).create_engine_config() for folder in sys.argv[1:]}
    *_, mixture = configs.values()  # for which vLLM makes a group of experts too
    with tempfile.TemporaryDirectory() as store, set_current_vllm_config(mixture):
        init_distributed_environment(1, 0, f"file://{store}/store", backend="gloo")
        initialize_model_parallel(backend="gloo")
    load_script("backends").fake_platform("9.0")
    for folder, config in configs.items():
        config.parallel_config.tensor_parallel_size = 2
        for rank in range(2):
            get_tp_group().world_size, get_tp_group().rank_in_group = 2, rank
            config.compilation_config.static_forward_context.clear()  # of the layers of the other rank
            with set_current_vllm_config(config):
                model = initialize_model(config)
                loader = DefaultModelLoader(config.load_config)
                model.load_weights(loader.get_all_weights(config.model_config, model))
            # Without what no checkpoint has: the scales of attention.
            held = {name: weight.data for name, weight in model.named_parameters() if ".attn." not in name}
            torch.save(held, Path(folder, f"rank{rank}.pt"))


if __name__ == "__main__":
    main()
