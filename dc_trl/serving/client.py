"""TRL's client of a vLLM server, extended by the weights that the server must hold and by limits of its requests."""

import math
import uuid
from collections.abc import Callable, Sequence
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from transformers import PretrainedConfig
from trl.generation.vllm_client import VLLMClient

from .background import all_of, in_coroutine, pause
from .connection import ONE_TRY, SESSION, Connection, Patience, persist, wait_until_up
from .errors import ServerError, ServerRefusedError, ServerUnavailableError
from .fit import PLAIN_CACHES, check_server, is_cpu


LOADING = "loading-"  # prefix of the version of weights that are not completely loaded
UNNAMED = "default"  # version of the weights with which a server starts
ASKED = 16  # how often the version of a server's weights is asked after a rollout, as routers may send it anywhere
_USED = "Does another run use it? If it is a router, list its servers in vllm_server_base_urls."
_AS_JSON = {"config_format": "json"}
T = TypeVar("T")
Fits: TypeAlias = "Callable[[ServerClient], None]"  # raises a ServerError if a server does not fit the run
# Entries of a server's configuration that decide, beside its weights and layers, what it samples.
_SAMPLES_BY = ("served_model_name", "revision", "dtype", "quantization", "logprobs_mode", "max_model_len")
_told = set[str]()  # addresses of servers of which a run was told that it counts their weights' versions


def first_difference(before: Any, now: Any) -> tuple[str, str]:
    """Return two values that differ as texts, or their first lines that differ."""
    lines = zip_longest(str(before).splitlines(), str(now).splitlines(), fillvalue="")
    return next(((repr(was.strip()), repr(line.strip())) for was, line in lines if was != line), (before, now))


def require_loaded(version: str | None, url: str) -> None:
    """Raise a `ServerError` if the weights that a server reports are being loaded, or their load was cut off."""
    if version is not None and version.startswith(LOADING):
        raise ServerError(
            f"vLLM at {url} holds weights {version!r}: they are being loaded, or their load was cut off, which "
            "leaves an unknown mixture. Wait until the load has ended; if no run uses this server, start it anew."
        )


class Weights(NamedTuple):
    """The weights that a server must hold."""

    version: str  # a name that no other run and no restarted server uses
    checkpoint: Path | None  # the path that the server sees; None for streamed weights, which cannot be reloaded
    adapter: Path | None = None  # likewise, of an adapter beside them; its name on the server is the version


class RolloutSeeds:
    """Seeds of the prompts of a rollout, derived from one number of PyTorch's generator, and their sessions.

    Checkpoints store that generator, so a resumed run samples the same completions as an uninterrupted one. A session
    names a conversation, which a router keeps on the server that has its turns in the prefix cache.
    """

    def __init__(self) -> None:
        self._rollout_seed: int | None = None
        self._sessions: dict[tuple[int, ...], str] = {}  # by first prompt, of the last requests

    def draw(self, seed: int | None = None) -> int:
        """Draw the number of the next rollout and return it; otherwise `requests` draws it.

        Args:
            seed: number that was drawn for this rollout before, by a run that could not sample it.
        """
        self._rollout_seed = int(torch.randint(2**62, ()).item()) if seed is None else seed
        return self._rollout_seed

    def requests(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return one request for each prompt of a body for /v1/completions, with the same seeds until `forget`.

        Greedy requests get no seed. A seed in the body is kept, so that all prompts draw the same numbers.
        """
        prompts = body["prompt"]
        sessions = zip(prompts, self._sessions_of(prompts), strict=True)
        requests = [body | {"prompt": [prompt], "session_id": session} for prompt, session in sessions]
        if body["temperature"] > 0 and body.get("seed") is None:
            rollout_seed = self.draw() if self._rollout_seed is None else self._rollout_seed
            # vLLM adds the number of a completion to the seed of its prompt, so the seeds must be far apart.
            seeds = np.random.SeedSequence(rollout_seed).generate_state(len(prompts), np.uint64)
            for request, seed in zip(requests, seeds, strict=True):
                request["seed"] = int(seed) >> 2
        return requests

    def forget(self) -> None:
        """End the rollout, so that the next one gets other seeds."""
        self._rollout_seed = None

    def headers(self, count: int) -> list[dict[str, str]]:
        """Return headers of requests that a router sends where it sent the last prompts; one without before them."""
        sessions = list(self._sessions.values())
        return [{SESSION: session} for session in islice(cycle(sessions), count)] or [{}]

    def _sessions_of(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Return the session of each prompt: that of the longest first prompt with which it begins, or a new one."""
        lengths = sorted({len(first) for first in self._sessions}, reverse=True)
        firsts = [
            next((prompt[:length] for length in lengths if prompt[:length] in self._sessions), prompt)
            for prompt in map(tuple, prompts)
        ]
        self._sessions = {first: self._sessions.get(first) or uuid.uuid4().hex for first in firsts}
        return [self._sessions[first] for first in firsts]


class RolloutClient(VLLMClient):
    """What a client of one server and of several have in common.

    `generate` is tried again if the servers fail. Each prompt is a separate request with its own seed, so that the
    same run samples the same completions again. Once the client has been given weights, completions count only if the
    servers held these weights before and after them; a server that lost them loads them first.

    Attributes:
        weights: weights that the servers must hold for a rollout; None to accept any.
        seeds: seeds of the prompts of rollouts.
        servers: clients of the servers that sample; of one server, the client itself.
        vocabulary: bound below which all token ids of the model are; None if it is unknown.
        routed_experts: experts with which the last completions were sampled, each of shape (tokens of prompt and
            completion less one, decoder layers, k), unsigned; None where the server does not return them.
    """

    all_needed = False  # whether everything that is asked has to be up before another try, and not one of them

    def __init__(self, servers: "Sequence[ServerClient]", connections: Sequence[Connection]):
        # TRL's constructor connects to one server. The first connection sends the requests for completions.
        self.servers, self.connections, self.connection = servers, connections, connections[0]
        self.patience, self.report = self.connection.patience, self.connection.report
        if self not in servers:  # they are tried again together
            for server in servers:
                server.connection.patience = self.patience._replace(max_retries=0)
        self.weights: Weights | None = None
        self.seeds = RolloutSeeds()
        self.vocabulary: int | None = None
        self.routed_experts: list[np.ndarray | None] = []

    def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Generate as TRL's `VLLMClient.generate` does.

        Raises:
            ServerError: the servers refused or failed in all tries, or gave no answers of their weights.
        """
        ask = super().generate

        def sample(first: bool) -> dict[str, Any]:
            self.hold(self.weights, reload=not first)
            output = ask(*args, **kwargs)
            if kwargs.get("logprobs") == 0:
                output["logprob_token_ids"] = None  # the sampled tokens again, for which each process would wait
            in_coroutine(self.require_kept(self.weights))
            return output

        try:
            return self.persist(sample)
        finally:
            self.seeds.forget()  # not earlier, so that another try samples the same completions

    def image_features(self, images: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Have images processed as TRL's `VLLMClient` does; a `ServerError` if there are several servers."""
        if self not in self.servers:
            raise ServerError(
                "Prompts with images are sampled by one server alone: set vllm_server_base_url in place of "
                "vllm_server_base_urls."
            )
        return super().image_features(images, *args, **kwargs)

    @property
    def common_context(self) -> float:
        """The largest number of tokens of prompt and completion together that each of the servers takes."""
        return min(server.context for server in self.servers)

    def load(self, weights: Weights) -> None:
        """Load weights from their checkpoint, unless they are there; later rollouts use these weights.

        Raises:
            ServerError: they cannot be loaded, or all tries failed.
        """
        self.weights = weights
        self.persist(lambda first: self.hold(weights, reload=not first))

    def persist(self, action: Callable[[bool], T]) -> T:
        """Return the result of an action, which may be tried again; see `connection.persist`."""
        return persist(self.connections, action, self.patience, self.all_needed)

    def hold(self, weights: Weights | None, reload: bool) -> None:
        """Load weights into servers that do not hold them, or that may not (`reload`), in one try; None accepts any.

        Raises:
            ServerUnavailableError: the load failed, or a server holds other weights afterwards.
            ServerError: there is no checkpoint from which to load them.
        """
        raise NotImplementedError

    async def require_kept(self, weights: Weights | None) -> None:
        """Raise a `ServerUnavailableError` if completions may be of other weights, unless each has been checked."""

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        path = url.removeprefix(self.base_url)
        if path != "/v1/completions":
            return self.connection.request("POST", path, **kwargs)
        # Each prompt is a separate request, since only a request can have a seed.
        requests, context = self.seeds.requests(kwargs["json"]), self.common_context
        for request in requests:
            (prompt,) = request["prompt"]
            if not isinstance(prompt, str):  # a later turn has less room, and vLLM refuses more than there is
                request["max_tokens"] = max(1, min(request["max_tokens"], context - len(prompt)))
        choices = self._complete(requests)
        # TRL does not pass the experts on.
        self.routed_experts = [choice.get("routed_experts") for choice in choices]
        return {"choices": choices}

    def _complete(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.connection.complete_all(requests, self.vocabulary)


class ServerClient(RolloutClient):
    """Client of a vLLM server whose weights are replaced during training.

    Args:
        base_url: address of the server, "http://127.0.0.1:8000".
        fits: called with the client when it has met the server, and in `hold`, to refuse a server that does not fit.
        group_port: port of TRL's NCCL weight stream.
        start_timeout: seconds to wait until the server is up.
        patience: time limits and number of tries of requests.
        report: function that takes a line about what is happening.

    Attributes:
        vllm: version of vLLM that the server names.
        kv_cache_dtype: dtype of its KV cache as it names it, "auto" for that of the model; None before `require_fit`.
        context: largest number of tokens of prompt and completion together; infinite before `require_fit`.
        lost, answered: as one of several, why it gets no prompts, and the number of prompts that it has answered.

    Raises:
        ServerUnavailableError: the server is not up within `start_timeout`.
        ServerError: the server requires an API key, or has no development endpoints, or does not fit.
    """

    def __init__(
        self,
        base_url: str,
        *,
        fits: Fits = lambda client: None,
        group_port: int = 51216,
        start_timeout: float = 240.0,
        patience: Patience = ONE_TRY,
        report: Callable[[str], None] = print,
    ):
        super().__init__([self], [Connection(base_url, patience, report)])
        self.fits = fits
        self.kv_cache_dtype: str | None = None
        self.context: float = math.inf
        self._met: dict[str, Any] = {}  # what the server was at the first `require_fit`
        self.lost: str | None = None
        self.answered = 0
        self._counted: tuple[str, str] | None = None  # where the server cannot: its start, and its weights' version
        with self.connection.task() as end, self.connection.reading("/v1/models, /version or /server_info"):
            self.check_server(min(start_timeout, end.left))
            self.connection.persist(lambda first: self._meet(group_port))
            self.connection.persist(lambda first: fits(self))

    def _meet(self, group_port: int) -> None:
        """Connect, and count the versions of the weights here if the server cannot name them (vLLM before 0.31)."""
        super(RolloutClient, self).__init__(base_url=self.connection.url, group_port=group_port)
        self.vllm = self._version()
        try:
            self.connection.get("/weight_info")
        except ServerRefusedError:
            # This raises, with the remedy, if it is the development endpoints that are off.
            self._counted = self.get_server_info()["instance_id"], UNNAMED
            if self.base_url not in _told:
                _told.add(self.base_url)
                self.report(
                    f"vLLM {self.vllm} at {self.base_url} has no /weight_info (0.31 has it): this run counts the "
                    "versions of the weights itself. It notices when the server is restarted, and does not notice "
                    "when another run loads weights into it: let no other run use it."
                )

    # --- TRL's ways to the server -----------------------------------------------------------------------------------

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 1.0) -> None:
        """Wait until the server is up; see `wait_until_up`."""
        wait_until_up([self.connection], total_timeout)

    def get_server_info(self) -> dict[str, Any]:
        """Return the server's resolved configuration (`VllmConfig`) as a JSON tree."""
        return self._server_info()["vllm_config"]

    def _version(self) -> str:
        return str(self.connection.get("/version")["version"])

    def _server_info(self) -> dict[str, Any]:
        return self.connection.get("/server_info", params=_AS_JSON)

    def _get(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self.connection.get(url.removeprefix(self.base_url), **kwargs)

    # --- weights ----------------------------------------------------------------------------------------------------

    def hold(self, weights: Weights | None, reload: bool) -> None:
        served = "" if weights is None else self.weight_version()
        if reload or (weights is not None and served != weights.version):
            self.fits(self)  # it may have come back as another one
        if weights is None:
            return
        if weights.adapter is not None:
            self.model = weights.version  # which requests name
        if served == weights.version and not (reload and weights.checkpoint is not None):
            return
        if weights.checkpoint is None:
            raise ServerError(
                f"vLLM at {self.base_url} no longer holds the weights of this run (it was restarted, or another run "
                "uses it), and a restarted server cannot rejoin weight_sync='nccl': resume from the last checkpoint "
                "with a fresh server, or use weight_sync='checkpoint'."
            )
        self.name_weights(LOADING + weights.version)
        run = weights.version.rpartition("-")[0]
        if weights.adapter is None or reload or served.rpartition("-")[0] != run:  # the base of a run stays the same
            method = "reload_checkpoint" if is_cpu(self.get_server_info()) else "reload_weights"
            self._collective_rpc(method, weights_path=str(weights.checkpoint))
            self.reset_prefix_cache()
        if weights.adapter is not None:
            self._load_beside(weights, run)
        self.name_loaded(weights.version)

    async def require_kept(self, weights: Weights | None) -> None:
        if weights is None:
            return
        asked = self.seeds.headers(ASKED if self._counted is None else 1)
        for version in await all_of(map(self.aweight_version, asked)):
            if version != weights.version:
                raise ServerUnavailableError(
                    f"vLLM at {self.base_url} lost or changed its weights during a rollout: {version!r}. {_USED}"
                )

    def require_fit(self, config: PretrainedConfig, **needs: Any) -> None:
        """Refuse the server if it would not sample the trained model, and take the model's `vocabulary`.

        Later calls also refuse a server that is not what it was at the first one.

        Args:
            config: configuration of the trained model.
            **needs: further arguments of `check_server`.

        Raises:
            ServerError: the server does not fit; the message names the option of `vllm serve` to change.
        """
        with self.connection.reading("/server_info"):
            info, layers = self._server_info(), self.layers()
            cache = info["vllm_config"]["cache_config"]["cache_dtype"]
            # Other versions of vLLM may lack some of these entries.
            present = {name: info["vllm_config"]["model_config"].get(name) for name in _SAMPLES_BY}
            present |= {"kv_cache_dtype": cache, "layers": layers, "version of vLLM": self._version()}
            for name, before in (self._met or present).items():
                if present[name] != before:
                    was, now = first_difference(before, present[name])
                    raise ServerError(
                        f"vLLM at {self.base_url} has come back as another server: its {name} changed from {was} "
                        f"to {now}. Start it with the model and the options that it had."
                    )
            check_server(info["vllm_config"], layers, config=config, **needs)
            self._met, self.kv_cache_dtype = present, cache
            self.context = info["vllm_config"]["model_config"]["max_model_len"]
            if needs.get("lora_rank") and not info["vllm_env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]:
                raise ServerError(
                    f"vLLM at {self.base_url} takes adapters only when it starts: start it with "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, or with dc-trl serve."
                )
        if needs["scheme"] is None and cache not in PLAIN_CACHES:
            self.report(f"vLLM at {self.base_url} has its KV cache in {cache}, which the mismatch contains")
        self.vocabulary = config.get_text_config().vocab_size

    def layers(self) -> str:
        """Return the engine's layers as text."""
        return self._collective_rpc("get_model_inspection")[0]

    def weight_version(self) -> str:
        """Return the version of the weights that the server holds; "default" until weights are loaded."""
        return in_coroutine(self.aweight_version())

    async def aweight_version(self, headers: dict[str, str] | None = None) -> str:
        """Do the same as `weight_version` in an event loop."""
        path = "/weight_info" if self._counted is None else "/server_info"
        answer = await self.connection.arequest("GET", path, params=_AS_JSON, headers=headers)
        with self.connection.reading(path):
            if self._counted is None:
                return answer["weight_version"]
            start, version = self._counted
            return version if answer["vllm_config"]["instance_id"] == start else UNNAMED

    def _load_beside(self, weights: Weights, run: str) -> None:
        """Load an adapter beside its base, in the place of others of the same run.

        Each version has a name of its own: vLLM 0.31 reads an adapter that was loaded in place (`load_inplace`) from
        its folder again in each step of the engine, and keeps the prefix cache of the old one.
        """
        with self.connection.reading("/v1/models"):
            names = [model["id"] for model in self.connection.get("/v1/models")["data"]]
        for name in names:
            if name.rpartition("-")[0] == run:
                self.connection.request("POST", "/v1/unload_lora_adapter", json={"lora_name": name})
        adapter = {"lora_name": weights.version, "lora_path": str(weights.adapter)}
        self.connection.request("POST", "/v1/load_lora_adapter", json=adapter)

    def name_weights(self, weight_version: str) -> None:
        """Set the server's name for its present weights.

        A version that begins with `LOADING` names weights that are being loaded. The server holds that name from
        before the first weight changes until all have changed, so that even after an interrupted load no name belongs
        to other weights than those it was given to.
        """
        if self._counted is not None:
            self._counted = self.get_server_info()["instance_id"], weight_version
            return
        self.connection.request("POST", "/update_weight_version", json={"new_version": weight_version})

    def name_loaded(self, weight_version: str) -> None:
        """Remove the prefix `LOADING` from the name of weights that were loaded successfully.

        Raises:
            ServerUnavailableError: another client has begun to load other weights into the server.
        """
        if self.weight_version() == LOADING + weight_version:
            self.name_weights(weight_version)
        if (served := self.weight_version()) != weight_version:
            raise ServerUnavailableError(
                f"vLLM at {self.base_url} serves weights {served!r} although {weight_version!r} were loaded. {_USED}"
            )

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache.

        Raises:
            ServerUnavailableError: requests of another client hold parts of it.
        """
        # Blocks of a request that has just ended may stay in use for a moment.
        for _ in range(50):
            with self.connection.reading("/reset_prefix_cache"):
                if self.connection.request("POST", "/reset_prefix_cache")["success"]:
                    return
            pause(0.1)
        raise ServerUnavailableError(
            f"vLLM at {self.base_url} cannot empty its prefix cache: requests of another client are running on it"
        )

    def _collective_rpc(self, method: str, **kwargs: Any) -> list:
        body = {"method": method, "kwargs": kwargs}
        with self.connection.reading("/collective_rpc"):
            return list(self.connection.request("POST", "/collective_rpc", json=body)["results"])
