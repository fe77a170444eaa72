"""TRL's vLLM engines, with weights that arrive as the deployable checkpoint and with recovery from faults."""

import gc
import math
import os
import shutil
import socket
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration, empty_cache

from ..files import locked_folder
from ..processes import agree, raised_together
from ..quantization.adapter import require_adapter_beside, write_adapter
from ..quantization.checkpoint import CheckpointWriter
from ..quantization.policy import empty_copy, unwrapped
from ..quantization.tensors import deployed_tensors, is_packed, policy_tensors
from ..serving.client import LOADING, ServerClient, Weights
from ..serving.completions import ended
from ..serving.connection import Connection, Patience, is_local
from ..serving.errors import ServerError
from ..serving.fit import reloadable, require_shared_directory
from ..serving.server import BLOCK_SCALES, vllm_version
from ..serving.several import RoutedServers, ServerPool, meet_servers, require_listed
from ..settings.neutral_sampling import TRUNCATIONS, truncations
from .named_tokens import named_by_vllm


logger = get_logger(__name__)
_BASE = "base"  # the folder of what stays beside adapters, among those of the versions


class Generation(VLLMGeneration):
    """TRL's vLLM engine; with `logprobs` it returns the most probable tokens, or those of truncated sampling.

    Attributes:
        last_sync: `bytes_written`, `write_seconds` and `reload_seconds` of the last synchronization; empty on
            processes that write no checkpoint.
        identity: engine, version and KV-cache dtype as they are said to be, for the contract of a deployed checkpoint;
            of a server, on the main process.
    """

    identity: tuple[str, str, str | None]

    def __init__(self, **kwargs: Any):
        self.last_sync: dict[str, float] = {}
        super().__init__(**kwargs)
        if self.mode == "colocate":
            self.identity = ("vllm", vllm_version(), self.llm.llm_engine.vllm_config.cache_config.cache_dtype)
            self.llm.generate = _with_ends_of(self.llm.generate)
            # Registered after vLLM's own finalizer, so that it runs first when the process exits.
            self._end_engine = weakref.finalize(self, _end_engine, self.llm.llm_engine.engine_core)

    def close(self) -> None:
        """End an engine of this process, with the process group of `torch.distributed`; a server keeps running."""
        if self.mode == "colocate":
            self._end_engine()

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        # TRL gathers and merges the weights one by one; every process must iterate to the end. After a forward pass
        # alone, FSDP2 keeps some of them gathered, which TRL would take for shards.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return super()._iter_named_params()

    def generate(self, *args: Any, **kwargs: Any) -> tuple:
        """Generate as TRL does; with `logprobs`, each log-probability is one of `named_by_vllm`."""
        prompt_ids, completion_ids, logprobs, token_ids = super().generate(*args, **kwargs)
        if self.logprobs and self.temperature > 0:
            sampling = {name: getattr(self, name) for name in TRUNCATIONS} | (self.generation_kwargs or {})
            logprobs = named_by_vllm(completion_ids, logprobs, token_ids, self.logprobs, bool(truncations(sampling)))
        return prompt_ids, completion_ids, logprobs, token_ids


def _with_ends_of(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return `LLM.generate` whose completions say which of them the engine ended."""

    @wraps(generate)
    def generate_(*args: Any, **kwargs: Any) -> Any:
        requests = generate(*args, **kwargs)
        for completion in (completion for request in requests for completion in request.outputs):
            if completion.finish_reason == "stop":
                completion.token_ids = ended([*completion.token_ids])
        return requests

    return generate_


def _end_engine(engine: Any) -> None:
    """Shut vLLM down when the process exits, unless its process group has already ended with the default one."""
    if torch.distributed.is_initialized():
        engine.shutdown()
    elif "_finalizer" in vars(engine):  # not in vLLM 0.26, which leaves the engine to the end of the process
        engine._finalizer.detach()


class _DeployedGeneration(Generation):
    """A vLLM engine of TRL whose weights arrive as the deployable checkpoint, with a new version each time."""

    _run: str  # unique name of the run
    _writes = False  # whether this process writes checkpoints; all processes take part in gathering
    weight_version = ""  # version of the weights that the engine is to hold

    def __init__(self, args: Any, **kwargs: Any):
        self.deployment_scheme, self.weight_sync_dir = args.deployment_scheme, args.weight_sync_dir
        self._beside = args.lora_deployment == "adapter"  # then a checkpoint is the adapter alone, and the base stays
        self._syncs = 0
        super().__init__(**kwargs)

    def _begin_version(self) -> None:
        self._syncs += 1
        self.weight_version = f"{self._run}-{self._syncs}"

    def save_weights(self, directory: Path) -> None:
        """Copy the checkpoint that the engine holds, on the processes that write it."""
        if self._writes:
            shutil.copytree(self.checkpoint, directory)

    def load_weights(self, directory: Path) -> None:
        """Load a checkpoint that `save_weights` has copied into the engine. Every process has to call it."""
        self._begin_version()
        with raised_together(OSError):
            if self._writes:
                self._remove_checkpoints()
                shutil.copytree(directory, self.checkpoint)
        self._load()

    @property
    def checkpoint(self) -> Path:
        """Directory of the weights that the engine is to hold."""
        return self._folder(self._run) / self.weight_version

    def _folder(self, run: str) -> Path:
        # In shared memory by default. Host names contain no "_".
        return Path(self.weight_sync_dir or "/dev/shm", f"dc_trl-sync-{socket.gethostname()}_{run}")

    def _remove_checkpoints(self) -> None:
        for checkpoint in self._folder(self._run).iterdir():
            if checkpoint.name != _BASE:
                shutil.rmtree(checkpoint, ignore_errors=True)

    def _load(self) -> None:
        """Make the engine load the weights that it is to hold."""
        raise NotImplementedError

    def _timed_load(self) -> None:
        start = time.perf_counter()
        self._load()
        if self._writes:
            self.last_sync["reload_seconds"] = time.perf_counter() - start

    def _prepare_checkpoints(self, writes: bool) -> None:
        self._writes = writes  # the folder, which is removed when the process ends
        policy = unwrapped(self.accelerator, self.model)
        self._writer = CheckpointWriter(policy, self.deployment_scheme or "bf16", self.processing_class)
        if writes:
            folder = self._folder(self._run)
            stack = ExitStack()
            stack.enter_context(locked_folder(folder, others=self._folder("*").name))
            weakref.finalize(self, stack.close)
            if self._beside:
                self._writer.write(policy_tensors(policy, adapters=False), folder / _BASE)

    def _write(self) -> None:
        """Write the present weights on the processes that write; all take part in gathering, and raise its errors."""
        whole = False  # whether all weights were gathered, in which all processes take part

        def gathering() -> Iterator[tuple[str, Tensor]]:
            nonlocal whole
            if not self._beside:
                yield from deployed_tensors(self.accelerator, self.model, self._iter_named_params)
            whole = True

        tensors = gathering()
        try:
            if self._writes:
                self._remove_checkpoints()  # their room may be needed
                start = time.perf_counter()
                if self._beside:
                    size = write_adapter(unwrapped(self.accelerator, self.model), self.checkpoint)
                else:
                    size = self._writer.write(tensors, self.checkpoint)
                self.last_sync = {"bytes_written": size, "write_seconds": time.perf_counter() - start}
        finally:
            error = sys.exception()
            for _ in tensors:
                pass  # take part in gathering the rest, although it is not written
            if whole:  # where gathering itself failed, the others do not come here, and the launcher ends them
                with raised_together(ServerError):
                    if isinstance(error, OSError):
                        raise ServerError(
                            f"weight_sync_dir={self.weight_sync_dir!r}: the weights for vLLM cannot be written to "
                            f"{self._folder(self._run).parent} ({error.strerror or error}). Make room, or set "
                            "weight_sync_dir to another directory that both the trainer and the server see."
                        ) from error
                    if isinstance(error, Exception):  # not enough memory, for example
                        raise ServerError(
                            f"the weights for vLLM cannot be written: {type(error).__name__}: {error}"
                        ) from error


class ServerGeneration(_DeployedGeneration):
    """TRL's server mode, with weights that can arrive as the deployable checkpoint, and with retries after faults.

    Every synchronization gives the weights a version that no other run and no restarted server has. A rollout counts
    only if the server held that version before and after it; a server that lost it gets the weights again first. After
    `vllm_max_retries` failures of a request, or after `vllm_time_limit`, every process raises a `ServerError`.

    Args:
        args: `DCGRPOConfig` of the run.
        weight_sync: see [`~dc_trl.DCGRPOConfig`].
        **kwargs: see [`~trl.generation.vllm_generation.VLLMGeneration`].

    Attributes:
        vllm_client: client of the server or of all servers; on the main process.
        context: largest number of tokens of prompt and completion together that each of the servers takes.
        routed_experts: experts of the last completions of this process, see `ServerClient`; set with `routing_replay`.

    Raises:
        ServerError: the server cannot be reached or does not fit; the message names the option to change.
    """

    def __init__(self, args: Any, weight_sync: str, **kwargs: Any):
        self.weight_sync, self._args = weight_sync, args
        super().__init__(args, **kwargs)

    def _init_vllm(self) -> None:
        self._run = agree(uuid.uuid4().hex[:12])
        if self.weight_sync == "auto":
            # Processes may see the server and the GPUs differently, but the choice must be the same in all of them.
            self.weight_sync = agree(self._choose_weight_sync())
        context = 0
        # These are errors of TRL's client, of the folder, and of the checkpoint's layout.
        with raised_together(RuntimeError, ValueError, OSError):
            if self.accelerator.is_main_process:
                policy = unwrapped(self.accelerator, self.model)
                rank = require_adapter_beside(policy) if self._beside else 0
                self.vllm_client: Any = connect(self._args, policy.config, self.weight_sync, rank)
                context = self.vllm_client.common_context
                client = self.vllm_client.servers[0]
                self.identity = ("vllm", client.vllm, client.kv_cache_dtype)
                if self.weight_sync == "checkpoint":
                    self._prepare_checkpoints(writes=True)
                else:
                    with client.connection.task():
                        client.init_communicator(device=self.accelerator.device)
        self.context = agree(context)

    def _choose_weight_sync(self) -> str:
        url = server_addresses(self._args)[0][0]
        shares_gpu = is_local(url) and torch.cuda.device_count() == 1  # NCCL refuses two ranks on one GPU
        by_file = needs_checkpoint(self._args, self.accelerator.device)
        return "checkpoint" if by_file or shares_gpu or is_packed(self.model) else "nccl"

    def sync_weights(self) -> None:
        """Send the policy's present weights to the server, and ensure that it serves them."""
        self._begin_version()
        if self.weight_sync == "checkpoint":
            self._write()
            self._timed_load()
            return
        with raised_together(ServerError):
            # If the server cannot mark its weights as being loaded, no process begins to gather them.
            if self.accelerator.is_main_process:
                client, version = self.vllm_client, self.weight_version
                client.weights = Weights(version, None)
                client.connection.persist(lambda first: (client.fits(client), client.name_weights(LOADING + version)))
        with raised_together(ServerError):
            if self.accelerator.is_main_process:
                self._stream_weights()
            else:
                super().sync_weights()

    def _load(self) -> None:
        with raised_together(ServerError):
            if self.accelerator.is_main_process:
                written = self.checkpoint
                folders = (written.with_name(_BASE), written) if self._beside else (written, None)
                self.vllm_client.load(Weights(self.weight_version, *folders))

    def generate(self, prompts: list[list[int]], *args: Any, **kwargs: Any) -> tuple:
        with raised_together(ServerError), _uncollected():
            try:
                output = super().generate(prompts, *args, **kwargs)
            except ServerError:  # on the main process, while the others wait for its broadcast
                broadcast_object_list([([], [], [], [])], from_process=0)
                raise
        if self._args.routing_replay:
            # TRL distributes its own results to the other processes, but not the routed experts.
            all_experts = agree(self.vllm_client.routed_experts if self.accelerator.is_main_process else None)
            first = self.accelerator.process_index * len(prompts)
            self.routed_experts = all_experts[first : first + len(prompts)]
        return output

    def _stream_weights(self) -> None:
        client, version = self.vllm_client, self.weight_version
        with client.connection.task():
            try:
                super().sync_weights()
            except (RuntimeError, OSError) as error:  # a request or NCCL failed
                for _ in self._named_params:
                    pass  # take part in gathering the rest, although it is not sent
                if isinstance(error, ServerError):
                    raise
                raise ServerError(f"weight_sync='nccl' failed: {error}") from error
            client.connection.persist(lambda first: client.name_loaded(version))

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        # Kept, so that the iteration can be completed when its reader fails.
        self._named_params = super()._iter_named_params()
        if self.weight_sync == "nccl":
            # The policy may be in float32, and half of it would be sent for nothing.
            dtypes, as_trained = self._served_dtypes, self._named_params
            self._named_params = ((name, weight.to(dtypes.get(name, torch.bfloat16))) for name, weight in as_trained)
        return self._named_params

    @cached_property
    def _served_dtypes(self) -> dict[str, torch.dtype]:
        served = empty_copy(unwrapped(self.accelerator, self.model))
        return {name: parameter.dtype for name, parameter in served.named_parameters()}


class ColocateGeneration(_DeployedGeneration):
    """TRL's colocate mode with the engine in the deployment scheme.

    The engine is built on the deployable checkpoint and reloads it through vLLM's own reload, which repeats what a
    quantized layer does to its weights after loading; TRL's `load_weights` leaves that out. The parameters are the
    configuration of the run, and those of [`~trl.generation.vllm_generation.VLLMGeneration`].
    """

    def _init_vllm(self) -> None:
        # Each machine has its own folder, named by its first process: machines may share a directory and, in
        # containers, a host name.
        machine = self.accelerator.process_index - self.accelerator.local_process_index
        self._run = f"{agree(uuid.uuid4().hex[:12])}-{machine}"
        with raised_together(ValueError, OSError):
            # Each machine has one writer, because machines do not share memory.
            self._prepare_checkpoints(writes=self.accelerator.is_local_main_process)
        self._write_checkpoint()
        # TRL builds the engine on `model.name_or_path`, with BitsAndBytes if the trained model has layers of it.
        model: Any = self.model
        self.model: Any = SimpleNamespace(name_or_path=str(self.checkpoint), named_modules=lambda: iter(()))
        self._reload: str | Callable[..., None] = "reload_weights"
        needs = {}
        if self.accelerator.device.type == "cpu":
            from ..serving.cpu_reload import CPUReloadExtension  # it imports vLLM, which is known to be installed here

            self._reload = CPUReloadExtension.reload_checkpoint
        else:
            needs = reloadable(self.deployment_scheme or "bf16", unwrapped(self.accelerator, model).config)
        os.environ.update(BLOCK_SCALES | os.environ)
        engine = vllm_generation.LLM
        vllm_generation.LLM = partial(engine, **needs)  # for which TRL has no setting
        try:
            super()._init_vllm()
        finally:
            vllm_generation.LLM = engine
            self.model = model

    def _write_checkpoint(self) -> None:
        self._begin_version()
        self._write()
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """Load the policy's present weights into the engine."""
        if self.enable_sleep_mode:
            empty_cache()  # as TRL does: the engine needs the memory of activations that are no longer in use
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        self._write_checkpoint()
        self._timed_load()

    def _load(self) -> None:
        self.llm.collective_rpc(self._reload, kwargs={"weights_path": str(self.checkpoint)})
        if self.enable_sleep_mode:
            self.llm.collective_rpc(restore_cache_scales)
        self.llm.reset_prefix_cache()


def restore_cache_scales(worker: Any) -> None:
    """Set the scales of attention and KV cache in a worker of vLLM to 1 again, which its sleep has lost.

    It keeps buffers alone, and in vLLM 0.26 to 0.31 these are parameters of a compressed-tensors model. No checkpoint
    has them: the scale of `+fp8_kv` is 1.
    """
    for name, weight in worker.model_runner.model.named_parameters():
        if name.endswith(("._q_scale", "._k_scale", "._v_scale")):
            weight.data.fill_(1.0)


def server_addresses(args: Any) -> tuple[list[str], str | None]:
    """Return the addresses of the servers of a run, and that of the router before them, if there is one."""
    one, several = args.vllm_server_base_url, args.vllm_server_base_urls
    if several:
        return several, one if one not in several else None
    return [one or f"http://{args.vllm_server_host}:{args.vllm_server_port}"], None


def connect(
    args: Any, config: PretrainedConfig, weight_sync: str, lora_rank: int, longest_request: float = math.inf
) -> Any:
    """Return the client of the server, the router or the several servers of a run, once all of them are up and fit.

    Args:
        args: `DCGRPOConfig` of the run.
        config, weight_sync, lora_rank: see `check_server`.
        longest_request: bound of `vllm_request_timeout`, in seconds.

    Raises:
        ServerError: a server cannot be reached or does not fit; the message names it, and the option to change.
    """
    urls, router = server_addresses(args)
    for url in urls if router is None else [router, *urls]:
        Connection(url)  # refuses what is no address
    if weight_sync == "checkpoint":
        require_shared_directory(args.weight_sync_dir, urls)
    seconds = min(longest_request, args.vllm_request_timeout or 3600.0)
    waits = Patience(seconds, args.vllm_server_timeout, args.vllm_max_retries, args.vllm_time_limit, "vllm_")

    def fits(client: ServerClient) -> None:
        client.require_fit(
            config,
            scheme=args.deployment_scheme,
            max_length=max(args.max_completion_length + 1, args.vllm_max_model_length or 0),
            logprobs=args.named_tokens,
            weight_sync=weight_sync,
            routing_replay=args.routing_replay,
            lora_rank=lora_rank,
        )

    servers = meet_servers(
        urls,
        fits=fits,
        group_port=args.vllm_group_port,
        start_timeout=args.vllm_server_timeout,
        patience=waits,
        report=logger.warning,
    )
    if router is not None:
        return RoutedServers(router, servers)
    if len(servers) > 1:
        return ServerPool(servers)
    require_listed(servers[0].connection, 1)
    return servers[0]


def needs_checkpoint(args: Any, device: torch.device) -> bool:
    """Return whether weights reach the servers of a run only as a checkpoint, whatever the policy is.

    NCCL needs CUDA, and streams the trained weights, merged, and not the deployed ones. The stream of TRL's client
    goes to one server; with several, all would wait for one that is lost.
    """
    urls, router = server_addresses(args)
    several = router is not None or len(urls) > 1
    quantized = args.deployment_scheme not in (None, "bf16")
    return several or quantized or args.lora_deployment == "adapter" or device.type != "cuda"


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python's garbage collector from going over a batch's lists again and again while they are made."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
