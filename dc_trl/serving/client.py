"""TRL's client of a vLLM server, with the weights that the server is to hold, and with requests that end."""

import base64
import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from trl.generation.vllm_client import VLLMClient

from .connection import ONE_TRY, Connection, Deadline, Patience
from .errors import ServerError, ServerUnavailableError
from .fit import ROUTES_OPTION, is_cpu
from .seeds import RolloutSeeds


_IMAGES_AT_ONCE = 64  # prompts with images on their way, as many as TRL sends
LOADING = "loading-"  # begins the version of weights that are not all there yet


def require_loaded(version: str | None, url: str) -> None:
    """Refuses the weights of a server that are not all of one version.

    Args:
        version: that the server gives; None where it gives none.
        url: of the server, for the message.

    Raises:
        ServerError: they are being loaded, or a load of them was cut off.
    """
    if version is not None and version.startswith(LOADING):
        raise ServerError(
            f"vLLM at {url} holds weights {version!r}: they are being loaded, or a load of them was cut off, and then "
            "nobody can say what they are. Wait until it has ended; where no run uses this server any more, start it "
            "anew."
        )


class Weights(NamedTuple):
    """The weights that a server is to hold."""

    version: str  # a name that no other run and no restarted server has
    checkpoint: Path | None  # as the server sees it; None where they were streamed, and cannot be loaded again


class ServerClient(VLLMClient):
    """Client of a vLLM server whose weights are replaced during training.

    `generate` is tried again where the server fails. Each prompt is a request of its own with a seed of its own, so
    that the same run samples the same again. Once the client has been given weights, completions count only
    if the server held these before and after them; a server that lost them gets them again first.

    Args:
        base_url: address of the server, "http://127.0.0.1:8000".
        group_port: port of TRL's NCCL weight stream.
        start_timeout: seconds to wait for the server to be up.
        patience: how long and how often the server is asked.
        deadline: of the task that the client's first requests are part of; a task of their own by default.
        report: takes a line about what is happening.

    Attributes:
        connection: what the requests go through.
        weights: what the server has to hold for a rollout; None: whatever it holds.
        seeds: of the prompts of rollouts.
        routed_experts: experts that the last completions were sampled with, each of shape (tokens of prompt and
            completion less one, decoder layers, k), unsigned; None where the server does not return them.

    Raises:
        ServerUnavailableError: the server is not up within `start_timeout`.
        ServerError: it asks for a key.
    """

    def __init__(
        self,
        base_url: str,
        *,
        group_port: int = 51216,
        start_timeout: float = 240.0,
        patience: Patience = ONE_TRY,
        deadline: Deadline | None = None,
        report: Callable[[str], None] = print,
    ):
        self.connection = Connection(base_url, patience, report)
        self.weights: Weights | None = None
        self.seeds = RolloutSeeds()
        self.routed_experts: list[np.ndarray | None] = []
        connect = super().__init__
        with self.connection.task(deadline) as end:
            self.check_server(min(start_timeout, end.left))
            self.connection.persist(lambda first: connect(base_url=self.connection.url, group_port=group_port))

    # --- TRL's ways to the server -----------------------------------------------------------------------------------

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 1.0) -> None:
        """See `Connection.wait_until_up`."""
        self.connection.wait_until_up(total_timeout, retry_interval)

    def get_server_info(self) -> dict[str, Any]:
        """The server's resolved configuration (`VllmConfig`), as a JSON tree."""
        return self.connection.get("/server_info", params={"config_format": "json"})["vllm_config"]

    def _get(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self.connection.get(url.removeprefix(self.base_url), **kwargs)

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        path = url.removeprefix(self.base_url)
        if path != "/v1/completions":
            return self.connection.request("POST", path, **kwargs)
        # A request for each prompt, which alone can have a seed of its own.
        answers = self.connection.post_all(path, self.seeds.requests(kwargs["json"]))
        choices = [choice for answer in answers for choice in answer["choices"]]
        self.routed_experts = routes_of(choices)  # TRL passes on no more than tokens and log-probabilities
        return {"choices": choices}

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See TRL's `VLLMClient.generate`.

        Raises:
            ServerError: the server refused, or failed for good; or it did not give what a rollout of its weights
                needs.
        """
        try:
            return self.connection.persist(lambda first: self._generate(first, *args, **kwargs))
        finally:
            self.seeds.forget()  # not before: what is tried again is sampled alike

    def _generate(self, first: bool, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self.weights is None:
            return super().generate(*args, **kwargs)
        self.hold(self.weights, reload=not first)
        output = super().generate(*args, **kwargs)
        self.require_version(self.weight_version(), self.weights)
        require_log_probs(output["logprobs"], self.base_url)
        return output

    def _generate_from_features(
        self, prompts: list[list[int]], features: list[dict[str, Any] | None], sampling_params: dict[str, Any]
    ) -> dict[str, list]:
        # TRL sends a request for each of these prompts, all with the same settings.
        requests = self.seeds.requests(sampling_params | {"prompt": prompts})
        ask = super()._generate_from_features

        def complete(number: int) -> dict[str, list]:
            settings = {name: value for name, value in requests[number].items() if name != "prompt"}
            return ask(prompts[number : number + 1], features[number : number + 1], settings)

        with ThreadPoolExecutor(min(_IMAGES_AT_ONCE, len(prompts))) as pool:
            outputs = list(pool.map(complete, range(len(prompts))))
        return {name: [entry for output in outputs for entry in output[name]] for name in outputs[0]}

    def require_routes(self) -> None:
        """See the function of this name, of the last completions."""
        require_routes(self.routed_experts, self.base_url)

    # --- weights ----------------------------------------------------------------------------------------------------

    def load(self, weights: Weights) -> None:
        """Brings weights to the server from their checkpoint, unless it holds them; rollouts are theirs from now on.

        Raises:
            ServerError: the server cannot load them, or failed for good.
        """
        self.weights = weights
        self.connection.persist(lambda first: self.hold(weights, reload=not first))

    def hold(self, weights: Weights, reload: bool) -> None:
        """Loads the weights into a server that does not hold them, or where they are in doubt (`reload`); one try.

        Raises:
            ServerUnavailableError: it failed, or holds others in the end.
            ServerError: there is nothing to load them from.
        """
        if self.weight_version() == weights.version and not (reload and weights.checkpoint is not None):
            return
        if weights.checkpoint is None:
            raise ServerError(
                f"vLLM at {self.base_url} no longer holds the weights of this run (it was restarted, or another run "
                "uses it), and a restarted server cannot rejoin weight_sync='nccl': resume from the last checkpoint "
                "with a fresh server, or use weight_sync='checkpoint'."
            )
        self.load_checkpoint(str(weights.checkpoint), weights.version)

    def require_version(self, served: str, weights: Weights) -> None:
        """Refuses completions after which the server held another version than that of their weights.

        Raises:
            ServerUnavailableError: it did.
        """
        if served != weights.version:
            raise ServerUnavailableError(f"vLLM at {self.base_url} lost or changed its weights during a rollout")

    def layers(self) -> str:
        """The engine's layers, as text."""
        return self._collective_rpc("get_model_inspection")[0]

    def weight_version(self) -> str:
        """Version of the weights that the server holds; "default" since it started."""
        return self.connection.get("/weight_info")["weight_version"]

    def load_checkpoint(self, directory: str, weight_version: str) -> None:
        """Has the server reload its weights in place, and forget what it cached with the old ones.

        Args:
            directory: of the checkpoint, as the server sees it.
            weight_version: see `name_weights`.

        Raises:
            ServerUnavailableError: it failed, or loads others meanwhile.
        """
        self.name_weights(LOADING + weight_version)
        self._collective_rpc(self._reload_method, weights_path=directory)
        self.reset_prefix_cache()
        self.name_loaded(weight_version)

    @cached_property
    def _reload_method(self) -> str:
        return "reload_checkpoint" if is_cpu(self.get_server_info()) else "reload_weights"

    def name_weights(self, weight_version: str) -> None:
        """Has the server call its present weights by this version from now on.

        A version that begins with `LOADING` is of weights that are being loaded. The server has it from before the
        first of them changes until all have: whatever cuts a load off, no name outlives the weights that it was given
        to.
        """
        self.connection.request("POST", "/update_weight_version", json={"new_version": weight_version})

    def name_loaded(self, weight_version: str) -> None:
        """Takes away the `LOADING` from the name of weights whose load has ended well.

        Raises:
            ServerUnavailableError: another client has begun to load others into the server.
        """
        before = self.weight_version()
        if before == LOADING + weight_version:
            self.name_weights(weight_version)
        if (served := self.weight_version()) != weight_version:
            raise ServerUnavailableError(
                f"vLLM at {self.base_url} serves weights {served!r} where {weight_version!r} were loaded: does "
                "another run use it?"
            )

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache.

        Raises:
            ServerUnavailableError: requests of another client hold parts of it.
        """
        # Blocks of a request that has just ended may be held for a moment.
        for _ in range(50):
            if self.connection.request("POST", "/reset_prefix_cache")["success"]:
                return
            time.sleep(0.1)
        raise ServerUnavailableError(
            f"vLLM at {self.base_url} cannot empty its prefix cache: requests of another client are running on it"
        )

    def _collective_rpc(self, method: str, **kwargs: Any) -> list:
        body = {"method": method, "kwargs": kwargs}
        return self.connection.request("POST", "/collective_rpc", json=body)["results"]


def require_log_probs(logprobs: list[list[list[float | None]]] | None, where: str) -> None:
    """Refuses completions that cannot be trained on.

    Args:
        logprobs: as TRL's client returns them, (completions, tokens, named tokens).
        where: the server's address, for the message.

    Raises:
        ServerUnavailableError: some are NaN, which TRL's client calls None.
        ServerError: there are none.
    """
    if logprobs is None:
        raise ServerError(f"vLLM at {where} returned no log-probabilities: leave `logprobs` to the trainer.")
    if any(value is None for logps in logprobs for token in logps for value in token):
        raise ServerUnavailableError(f"vLLM at {where} returned log-probabilities that are NaN")


def require_routes(routed_experts: list[np.ndarray | None], where: str) -> None:
    """Refuses completions that came without the experts that they were sampled with.

    Raises:
        ServerError: the server does not return them any more.
    """
    if not routed_experts or any(routes is None for routes in routed_experts):
        raise ServerError(
            f"vLLM at {where} did not return the experts that routing_replay=True replays: start it with "
            f"{ROUTES_OPTION}."
        )


def routes_of(choices: list[dict[str, Any]]) -> list[np.ndarray | None]:
    """The experts of each completion in the answer of a server; see `ServerClient.routed_experts`."""
    return [_array(choice.get("routed_experts")) for choice in choices]


def _array(text: str | None) -> np.ndarray | None:
    """An array as vLLM sends it: its .npy file in base64."""
    return None if text is None else np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
