"""How new weights reach vLLM, and how a run survives its faults: what TRL's `VLLMGeneration` leaves open."""

import math
import shutil
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from torch import Tensor
from trl.generation.vllm_generation import VLLMGeneration

from ..quantization.checkpoint import CheckpointWriter
from ..quantization.policy import unwrapped
from ..quantization.tensors import deployed_tensors, frozen_tensors, is_packed
from ..serving.client import LOADING, ServerClient, Weights
from ..serving.connection import Deadline, Patience, Tries, is_local
from ..serving.errors import ServerError
from ..serving.fit import check_server
from ..serving.pool import ServerPool
from .checkpoint_folder import CheckpointFolder, folder_path
from .truncation import named_by_vllm


logger = get_logger(__name__)


class Generation(VLLMGeneration):
    """TRL's vLLM engine; with `logprobs` above 0, it says which tokens truncated sampling kept.

    Attributes:
        last_sync: bytes and seconds of the last synchronization, see `WriteCost`, and `reload_seconds` of the engine;
            empty on processes that write no checkpoint.
        syncs: the sums of all synchronizations, and their `count`.
    """

    def __init__(self, **kwargs: Any):
        self.last_sync: dict[str, float] = {}
        self.syncs: Counter[str] = Counter()
        super().__init__(**kwargs)
        if self.mode == "colocate":
            # Made after vLLM's own, so that it comes first when the process exits.
            self._end_engine = weakref.finalize(self, _end_engine, self.llm.llm_engine.engine_core)

    def close(self) -> None:
        """Ends an engine of this process, and with it the process group of `torch.distributed`; a server lives on."""
        if self.mode == "colocate":
            self._end_engine()

    def generate(self, *args: Any, **kwargs: Any) -> tuple:
        """See TRL's; where the kept tokens are known, log-probabilities are `KeptLogProb`, one for each token."""
        prompt_ids, completion_ids, logprobs, token_ids = super().generate(*args, **kwargs)
        if self.logprobs and self.temperature > 0:
            logprobs = named_by_vllm(completion_ids, logprobs, token_ids)
        return prompt_ids, completion_ids, logprobs, token_ids


def _end_engine(engine: Any) -> None:
    """What vLLM does when the process exits, save where the process group is gone by then, and its own with it."""
    if torch.distributed.is_initialized():
        engine.shutdown()
    else:
        engine._finalizer.detach()


class _DeployedGeneration(Generation):
    """A vLLM engine of TRL whose weights arrive as the deployable checkpoint, in a new version each time."""

    _run: str  # a name that no other run has
    _writes = False  # whether this process writes checkpoints; all take part in gathering
    _kept: str | None = None  # version of the weights that the engine is to go back to
    weight_version = ""  # of the weights that it is to hold

    def __init__(self, *, deployment_scheme: str | None, weight_sync_dir: str | None, **kwargs: Any):
        self.deployment_scheme = deployment_scheme
        self.weight_sync_dir = weight_sync_dir
        self._syncs = 0
        super().__init__(**kwargs)

    def _begin_version(self, keep: bool = False) -> None:
        """The weights of the next checkpoint are those that the engine is to hold; `keep`: see `sync_weights`."""
        if not keep:
            self._kept = None
        elif self._kept is None:
            self._kept = self.weight_version
        self._syncs += 1
        self.weight_version = f"{self._run}-{self._syncs}"

    def go_back(self) -> None:
        """Brings the weights to the engine again that `sync_weights` has kept."""
        assert self._kept is not None
        self.weight_version, self._kept = self._kept, None
        self._load()
        if self._writes:
            self._folder.remove_all_but(self.weight_version)

    def save_weights(self, directory: Path) -> None:
        """Copies the checkpoint that the engine holds, or is to go back to, where this process has it."""
        if self._writes:
            shutil.copytree(self._folder.path / (self._kept or self.weight_version), directory)

    def load_weights(self, directory: Path) -> None:
        """Brings a checkpoint that `save_weights` has copied to the engine. Every process has to call it."""
        self._begin_version()
        if self._writes:
            self._folder.remove_all_but(None)
            shutil.copytree(directory, self.checkpoint)
        self.accelerator.wait_for_everyone()
        self._load()

    @property
    def checkpoint(self) -> Path:
        """Where the weights are that the engine is to hold."""
        return folder_path(self.weight_sync_dir, self._run) / self.weight_version

    def _load(self) -> None:
        """Has the engine load the weights that it is to hold."""
        raise NotImplementedError

    def _timed(self, load: Callable[[], None]) -> None:
        """Loads what was written last, and adds up what the synchronization has cost."""
        start = time.perf_counter()
        load()
        if self._writes:
            self.last_sync["reload_seconds"] = time.perf_counter() - start
            self.syncs.update(self.last_sync, count=1)

    def _prepare_checkpoints(self, writes: bool) -> None:
        """Makes the writer, and the folder on the processes that are to write."""
        self._writes = writes
        policy = unwrapped(self.accelerator, self.model)
        self._writer = CheckpointWriter(policy, self.deployment_scheme or "bf16", self.processing_class)
        if writes:
            self._folder = CheckpointFolder(self.weight_sync_dir, self._run)

    def _write(self) -> None:
        """Writes the present weights on the processes that are to; all processes take part in gathering them."""
        tensors = deployed_tensors(self.accelerator, self.model, self._iter_named_params)
        try:
            if self._writes:
                frozen = frozen_tensors(self.accelerator, self.model)
                self.last_sync = self._folder.write(self._writer, tensors, frozen, self.weight_version, self._kept)
        finally:
            for _ in tensors:
                pass  # take part in gathering what nobody writes any more


class ServerGeneration(_DeployedGeneration):
    """TRL's server mode, with weights that can arrive as the deployable checkpoint, and with faults that end.

    Every synchronization gives the weights a version that no other run and no restarted server has. A rollout counts
    only if the server held that version before and after it; a server that lost it gets the weights again first.
    What fails is tried again `vllm_max_retries` times, as long as `vllm_time_limit` lasts; then every process raises a
    `ServerError`.

    Args:
        weight_sync, vllm_request_timeout, vllm_time_limit, vllm_max_retries, and in **kwargs deployment_scheme and
            weight_sync_dir: see [`~dc_trl.DCGRPOConfig`].
        server_base_urls: addresses of several servers, which sample together; None for the one of **kwargs.
        routing_replay: the completions have to come with the experts that they were sampled with.
        server_timeout, **kwargs: see [`~trl.generation.vllm_generation.VLLMGeneration`].

    Attributes:
        vllm_client: what asks the server, or all of them; on the main process.
        routed_experts: of the last completions of this process, see `ServerClient`; where `routing_replay` is set.

    Raises:
        ServerError: the server is not there or does not fit; the message names the option to change.
    """

    def __init__(
        self,
        *,
        weight_sync: str,
        vllm_request_timeout: float | None,
        vllm_time_limit: float,
        vllm_max_retries: int,
        server_base_urls: list[str] | None,
        routing_replay: bool,
        server_timeout: float,
        **kwargs: Any,
    ):
        self.weight_sync = weight_sync
        self.server_base_urls = server_base_urls
        self.routing_replay = routing_replay
        self._patience = Patience(
            request_timeout=3600.0 if vllm_request_timeout is None else vllm_request_timeout,
            server_timeout=server_timeout,
            max_retries=vllm_max_retries,
            time_limit=vllm_time_limit,
            prefix="vllm_",
        )
        super().__init__(server_timeout=server_timeout, **kwargs)

    def _init_vllm(self) -> None:
        one = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        self._urls = [url.rstrip("/") for url in self.server_base_urls or [one]]
        self._run = agree(uuid.uuid4().hex[:12])
        if self.weight_sync == "auto":
            # What each process sees of the server and of the GPUs may differ, and what follows is collective.
            self.weight_sync = agree(self._choose_weight_sync())
        elif self.weight_sync == "nccl" and is_packed(self.model):
            raise ValueError(
                "weight_sync='nccl' streams weights as they are held, and load_in_4bit or load_in_8bit has packed "
                "these: set weight_sync='auto' or 'checkpoint'."
            )
        # Errors of TRL's client, of the folder, and of the checkpoint's layout.
        with raised_together(RuntimeError, ValueError, OSError):
            if self.accelerator.is_main_process:
                self._connect()

    def _choose_weight_sync(self) -> str:
        # NCCL wants CUDA, refuses two ranks on one GPU, and streams what is trained, not what is deployed. The stream
        # of TRL's client goes to one server; were there several in it, all would wait in it for one that is lost.
        shares_gpu = is_local(self._urls[0]) and torch.cuda.device_count() == 1
        quantized = self.deployment_scheme not in (None, "bf16")
        no_stream = (
            self.accelerator.device.type != "cuda"
            or shares_gpu
            or quantized
            or len(self._urls) > 1
            or is_packed(self.model)
        )
        return "checkpoint" if no_stream else "nccl"

    def _connect(self) -> None:
        """Meets servers that fit the policy.

        Raises:
            ServerError: there are none.
        """
        if self.weight_sync == "checkpoint":
            away = [url for url in self._urls if not is_local(url)]
            if self.weight_sync_dir is None and away:
                stream = ", or weight_sync='nccl'" if len(self._urls) == 1 else ""
                raise ServerError(
                    f"weight_sync_dir=None: the server at {' and '.join(away)} is on another machine, which does not "
                    f"see this one's shared memory. Set weight_sync_dir to a directory that both see{stream}."
                )
            self._prepare_checkpoints(writes=True)
        deadline = Deadline(self._patience.time_limit)
        waits = {"start_timeout": self.server_timeout, "patience": self._patience, "deadline": deadline}
        if len(self._urls) > 1:
            self.vllm_client: Any = ServerPool(self._urls, fits=self._require_fit, report=logger.warning, **waits)
            return
        client = ServerClient(self._urls[0], group_port=self.group_port, report=logger.warning, **waits)
        self.vllm_client = client
        with client.connection.task(deadline):
            self._require_fit(client)
            if self.weight_sync == "nccl":
                client.init_communicator(device=self.accelerator.device)

    def _require_fit(self, client: ServerClient) -> None:
        """Refuses a server that would not sample what is trained.

        Raises:
            ServerError: names what is wrong and the option of `vllm serve` to change.
        """
        info, layers = client.connection.persist(lambda first: (client.get_server_info(), client.layers()))
        check_server(
            info,
            layers,
            scheme=self.deployment_scheme,
            config=unwrapped(self.accelerator, self.model).config,
            max_length=max(self.max_completion_length + 1, self.max_model_length or 0),
            logprobs=self.logprobs,
            weight_sync=self.weight_sync,
            routing_replay=self.routing_replay,
        )

    def sync_weights(self, keep: bool = False) -> None:
        """Brings the policy's present weights to the server, and makes sure that it serves them.

        `keep` leaves the checkpoint from before for `go_back`, until a synchronization that does not.
        """
        self._begin_version(keep)
        with raised_together(ServerError):
            if self.weight_sync == "checkpoint":
                self._write_checkpoint()
                self._timed(self._bring)
                return
            self._announce()
            if self.accelerator.is_main_process:
                self._stream_weights()
            else:
                super().sync_weights()

    def _announce(self) -> None:
        """Has the server say that it is given weights; where it cannot, no process begins to gather them."""
        with raised_together(ServerError):
            if self.accelerator.is_main_process:
                client, version = self.vllm_client, self.weight_version
                client.weights = Weights(version, None)
                client.connection.persist(lambda first: client.name_weights(LOADING + version))

    def _load(self) -> None:
        with raised_together(ServerError):
            self._bring()

    def _bring(self) -> None:
        if self.accelerator.is_main_process:
            self.vllm_client.load(Weights(self.weight_version, self.checkpoint))

    def generate(self, prompts: list[list[int]], *args: Any, **kwargs: Any) -> tuple:
        with raised_together(ServerError):
            try:
                output = super().generate(prompts, *args, **kwargs)
            except ServerError:  # on the main process, while the others wait for what it sends them
                broadcast_object_list([([], [], None, None)], from_process=0)
                raise
            if self.routing_replay and self.accelerator.is_main_process:
                self.vllm_client.require_routes()
        if self.routing_replay:
            # TRL sends the other processes what it knows of; these go the same way.
            everyones = agree(self.vllm_client.routed_experts if self.accelerator.is_main_process else None)
            first = self.accelerator.process_index * len(prompts)
            self.routed_experts = everyones[first : first + len(prompts)]
        return output

    def _stream_weights(self) -> None:
        """TRL's stream of the weights, on the main process; the others take part in gathering them."""
        client, version = self.vllm_client, self.weight_version
        with client.connection.task():
            try:
                super().sync_weights()
            except (RuntimeError, OSError) as error:  # of a request or of NCCL
                for _ in self._named_params:
                    pass  # take part in gathering what nobody sends any more
                if isinstance(error, ServerError):
                    raise
                raise ServerError(f"weight_sync='nccl' failed: {error}") from error
            client.connection.persist(lambda first: client.name_loaded(version))

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        # Kept, so that it can be brought to its end when what reads it fails.
        self._named_params = super()._iter_named_params()
        return self._named_params

    def _write_checkpoint(self) -> None:
        """Writes the checkpoint, all processes taking part.

        Raises:
            ServerUnavailableError: on all processes, where the main one cannot write it.
        """
        tries = Tries(self._patience, Deadline(math.inf))
        while True:
            failure = None
            try:
                self._write()
            except OSError as error:
                if not self.accelerator.is_main_process:
                    raise
                failure = f"the checkpoint for the server cannot be written to {self._folder.path}: {error}"
            if (failure := agree(failure)) is None:
                return
            pause = tries.pause(failure)
            logger.warning(f"{failure}; {tries} follows")
            time.sleep(pause)


class ColocateGeneration(_DeployedGeneration):
    """TRL's colocate mode with the engine in the deployment scheme.

    The engine is built on the deployable checkpoint and reloads it through vLLM's own reload, which repeats what a
    quantized layer does to its weights after loading; TRL's `load_weights` leaves that out. The parameters are
    `deployment_scheme` and `weight_sync_dir` of [`~dc_trl.DCGRPOConfig`], and those of
    [`~trl.generation.vllm_generation.VLLMGeneration`].
    """

    def _init_vllm(self) -> None:
        # One folder for each machine, by its first process: two may share a directory, and in containers a name.
        machine = self.accelerator.process_index - self.accelerator.local_process_index
        self._run = f"{agree(uuid.uuid4().hex[:12])}-{machine}"
        # One writer on each machine, since shared memory ends there.
        self._prepare_checkpoints(writes=self.accelerator.is_local_main_process)
        self._write_checkpoint()
        # TRL builds the engine on `model.name_or_path`.
        model: Any = self.model
        self.model: Any = SimpleNamespace(name_or_path=str(self.checkpoint), named_modules=model.named_modules)
        self._reload: str | Callable[..., None] = "reload_weights"
        if self.accelerator.device.type == "cpu":
            from ..serving.cpu_reload import reload_checkpoint  # vLLM is imported here, where it is known to be there

            self._reload = reload_checkpoint
        try:
            super()._init_vllm()
        finally:
            self.model = model

    def _write_checkpoint(self, keep: bool = False) -> None:
        self._begin_version(keep)
        self._write()
        self.accelerator.wait_for_everyone()

    def sync_weights(self, keep: bool = False) -> None:
        """Brings the policy's present weights to the engine; `keep`: see `ServerGeneration.sync_weights`."""
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        self._write_checkpoint(keep)
        self._timed(self._load)

    def _load(self) -> None:
        self.llm.collective_rpc(self._reload, kwargs={"weights_path": str(self.checkpoint)})
        self.llm.reset_prefix_cache()


def agree(value: Any) -> Any:
    """The main process's value, on all processes, each of which has to come here."""
    return broadcast_object_list([value])[0]


@contextmanager
def raised_together(*errors: type[Exception]) -> Iterator[None]:
    """Raises such errors of the block on the main process on all processes, so that none waits for another."""
    failure: Exception | None = None
    try:
        yield
    except errors as error:
        failure = error
    message = agree(None if failure is None else str(failure))
    if message is not None:
        raise ServerError(message) if failure is None else failure
