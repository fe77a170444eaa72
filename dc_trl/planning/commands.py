"""The commands of a plan, as a user types them: the launch of training, and the server."""

import shlex

from ..settings.paths import shipped
from .plan import Plan, accumulation
from .step import Layout


# What `dc-trl serve` gives `vllm serve` on a GPU; `serving.server` says why. A test compares the two.
SERVE_OPTIONS = [
    *("--dtype", "bfloat16"),
    *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
    "--enable-prefix-caching",
    *("--weight-transfer-config", '{"backend": "nccl"}'),
]
_DENSE_FILE = "configs/accelerate/fsdp2.yaml"
_EXPERTS_FILE = "configs/accelerate/fsdp2_moe.yaml"
_EXPERTS_LAYER = "Qwen3MoeDecoderLayer"  # that the second file wraps


def replicas_of_a_node(layout: Layout) -> int:
    """Replicas of a serving node, at most; the last node may have fewer."""
    return min(layout.replicas, layout.devices_per_node // layout.tensor_parallel)


def engine_options(plan: Plan) -> list[str]:
    """Options of `vllm serve` that follow from the plan, for each node that serves."""
    layout, work = plan.layout, plan.work
    together = plan.engine.concurrency(work.prompt, work.lengths)
    share = -(-work.completions // layout.replicas)
    options = ["--tensor-parallel-size", str(layout.tensor_parallel)]
    if replicas_of_a_node(layout) > 1:
        options += ["--data-parallel-size", str(replicas_of_a_node(layout))]
    return [*options, "--gpu-memory-utilization", "0.9", "--max-num-seqs", str(min(together, share))]


def vllm_command(plan: Plan) -> list[str]:
    """The `vllm serve` line of one node, without the environment variable in front of it."""
    served = plan.model.name if plan.work.scheme == "bf16" else f"CHECKPOINT_IN_{plan.work.scheme.upper()}"
    address = ["--host", _address(plan), "--port", "8000", "--max-model-len", str(plan.work.longest)]
    return ["vllm", "serve", served, *address, *SERVE_OPTIONS, *engine_options(plan)]


def serve_command(plan: Plan) -> list[str]:
    """The same through `dc-trl serve`, which writes the checkpoint first."""
    work = plan.work
    options = ["--model", plan.model.name, "--scheme", work.scheme, "--host", _address(plan)]
    length = ["--max_model_len", str(work.longest)]
    return ["dc-trl", "serve", *options, *length, "--", *engine_options(plan)]


def launch_command(plan: Plan, config: str = "CONFIG.yaml") -> list[str]:
    """The `accelerate launch` line of the first training node.

    Args:
        plan: what is launched.
        config: file with the settings that the plan does not change.
    """
    layout = plan.layout
    micro, steps, generation = accumulation(plan.work, layout)
    settings = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": steps,
        "steps_per_generation": generation,
    }
    words = ["accelerate", "launch", *launcher_options(plan), "-m", "dc_trl", "train", "--config", config]
    words += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    if layout.reduce_each:
        words += ["--accelerator_config", '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}']
    if layout.strategy == "ddp":
        words += ["--gradient_checkpointing", str(plan.work.checkpointing).lower()]
    return words


def accelerate_file(plan: Plan) -> str | None:
    """The project's launch configuration that the plan takes; None where options of the launcher are enough."""
    if plan.layout.strategy != "fsdp2":
        return None
    return shipped(_EXPERTS_FILE if plan.model.layer_class == _EXPERTS_LAYER else _DENSE_FILE)


def launcher_options(plan: Plan) -> list[str]:
    """Options of `accelerate launch`."""
    layout = plan.layout
    file = accelerate_file(plan)
    if file is not None:
        options = ["--config_file", file]
        if not plan.work.checkpointing:
            options += ["--fsdp_activation_checkpointing", "false"]
    else:
        options = ["--multi_gpu"] if layout.train_devices > 1 else []
        options += ["--mixed_precision", "bf16", "--dynamo_backend", "no"]
    options += ["--num_processes", str(layout.train_devices), "--num_machines", str(layout.train_nodes)]
    if layout.train_nodes > 1:
        options += ["--machine_rank", "0", "--main_process_ip", "FIRST_NODE", "--main_process_port", "29500"]
    return options


def shell_lines(plan: Plan, config: str = "CONFIG.yaml") -> list[str]:
    """All of it for a shell: the server, and on the other devices the training."""
    layout, cluster = plan.layout, plan.cluster
    serve, launch = shlex.join(serve_command(plan)), shlex.join(launch_command(plan, config))
    if cluster.devices > cluster.devices_per_node:
        return [
            f"# on each of {layout.serving_nodes} serving node(s); the trainer is given all their URLs",
            serve,
            f"# on each of {layout.train_nodes} training node(s), with its own --machine_rank",
            launch,
        ]
    train = ",".join(map(str, range(layout.train_devices)))
    last = layout.train_devices + layout.serving_devices
    serving = ",".join(map(str, range(layout.train_devices, last)))
    return [f"CUDA_VISIBLE_DEVICES={serving} {serve}", f"CUDA_VISIBLE_DEVICES={train} {launch}"]


def _address(plan: Plan) -> str:
    return "127.0.0.1" if plan.cluster.devices <= plan.cluster.devices_per_node else "SERVING_NODE"
