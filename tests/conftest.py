import os


# Before torch is imported: tests run beside each other's subprocesses on few cores, and never reach a Hub.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest
import torch

from .helpers import make_tokenizer


torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()
