"""What training refuses of a configuration before it loads a model, for many configurations at once."""

import os
from pathlib import Path

import yaml

from ..files import write_text
from .arguments import RunArguments


def check_configurations(path: Path, jobs: int) -> None:
    """Puts configurations through the parser of a training run, and its checks that need no model.

    Call it in a process that is started as the runs will be: the parser sets up devices and process groups, and some
    settings have to fit the number of processes. It writes a file beside `path`.

    Args:
        path: YAML file with the settings of each configuration by its name.
        jobs: runs at the same time, which may not share a vLLM server.

    Raises:
        ValueError: names the configuration, the field, its value and the remedy.
    """
    file = path.with_name(f"variant-{os.getpid()}.yaml")
    for name, settings in yaml.safe_load(path.read_text()).items():
        write_text(file, yaml.safe_dump(settings))
        try:
            arguments = RunArguments.parse(["--config", str(file)])
            arguments.check()
        except (ValueError, TypeError, OSError, ImportError) as error:
            raise ValueError(f"variant {name!r}: {error}") from error
        server, args = arguments.server, arguments.trainer
        own = server.serve is not None and not server.serve_devices
        if jobs > 1 and args.use_vllm and args.vllm_mode == "server" and not own:
            raise ValueError(
                f"variant {name!r}: jobs={jobs} would share one vLLM server, or its GPUs, and load their weights over "
                "each other's: use --jobs 1, serve=auto without serve_devices, or vllm_mode=colocate."
            )
