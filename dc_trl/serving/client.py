"""TRL's client of a vLLM server, with limits on every wait, an API key, and the version of the weights it talks to."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from trl.generation.vllm_client import VLLMClient

from .server import ServerError, ServerUnavailableError, authorization, is_cpu, key_wanted


class Deadline:
    """When a task has to be done: all its tries, and the waits between them.

    Args:
        seconds: from now; `math.inf` for no limit.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self._end - time.monotonic())


class ServerClient(VLLMClient):
    """Client of a vLLM server whose weights are replaced during training.

    The key that the server may ask for is read from the environment variable `VLLM_API_KEY`, which `vllm serve` reads
    too.

    Args:
        base_url: address of the server, "http://127.0.0.1:8000".
        group_port: port of TRL's NCCL weight stream.
        start_timeout: seconds to wait for the server to be up.
        request_timeout: seconds that any one request may take, a generation batch or a reload of the weights.
        deadline: of the task that the client's first requests are part of; see `until`.
        report: takes a line about what is happening.

    Raises:
        ServerUnavailableError: the server is not up within `start_timeout`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        group_port: int = 51216,
        start_timeout: float = 240.0,
        request_timeout: float = 3600.0,
        deadline: Deadline | None = None,
        report: Callable[[str], None] = print,
    ):
        self._request_timeout = request_timeout
        self._deadline = deadline or _NEVER
        self._report = report
        self._headers = authorization()
        super().__init__(base_url=base_url.rstrip("/"), group_port=group_port, connection_timeout=start_timeout)
        self._deadline = _NEVER
        # Whether to try again is decided where weights and rollouts are known, not below HTTP.
        for prefix in ("http://", "https://"):
            self.session.mount(prefix, HTTPAdapter(pool_maxsize=64))

    @contextmanager
    def until(self, deadline: Deadline) -> Iterator[None]:
        """Has every request in the block end by the deadline, whatever else it may take."""
        self._deadline = deadline
        try:
            yield
        finally:
            self._deadline = _NEVER

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 1.0) -> None:
        """Waits until the server is up, and says that it waits.

        Raises:
            ServerUnavailableError: it is not up within `total_timeout` seconds.
        """
        wait_until_up(self.base_url, total_timeout, self._report, retry_interval)

    def get_server_info(self) -> dict[str, Any]:
        """The server's resolved configuration (`VllmConfig`), as a JSON tree."""
        return self._get(f"{self.base_url}/server_info", params={"config_format": "json"})["vllm_config"]

    def _get(self, url: str, **kwargs: Any) -> dict:
        return self._request("GET", url, **kwargs)

    def _post(self, url: str, **kwargs: Any) -> dict:
        return self._request("POST", url, **kwargs)

    def _request(self, method: str, url: str, **kwargs: Any) -> dict:
        path = url.removeprefix(self.base_url)
        left = self._deadline.left
        if left == 0:
            raise ServerUnavailableError(f"vLLM at {self.base_url} was not asked for {path}: no time is left for it")
        limit = min(self._request_timeout, left)
        try:
            response = self.session.request(
                method, url, headers=self._headers, timeout=(min(10, limit), limit), **kwargs
            )
        except requests.Timeout as error:
            allowed = (
                f"vllm_request_timeout={limit:g} s" if limit < left else f"the {limit:.3g} s that were left for it"
            )
            raise ServerUnavailableError(f"vLLM at {self.base_url} did not answer {path} within {allowed}") from error
        except requests.RequestException as error:
            raise ServerUnavailableError(
                f"the connection to vLLM at {self.base_url} broke during {path} ({type(error).__name__})"
            ) from error
        if response.status_code == 401:
            raise key_wanted(self.base_url)
        if response.status_code == 404 and not path.startswith("/v1"):
            raise ServerError(
                f"vLLM at {self.base_url} does not serve {path}: restart it with VLLM_SERVER_DEV_MODE=1 in its "
                "environment."
            )
        if "not JSON compliant" in response.text and response.status_code >= 400:
            # JSON has no NaN, so that vLLM refuses to send the log-probabilities of broken weights.
            raise ServerUnavailableError(
                f"vLLM at {self.base_url} computed NaN for {path}: its weights are broken, or the policy has diverged"
            )
        if response.status_code >= 500:
            raise ServerUnavailableError(
                f"vLLM at {self.base_url} failed at {path} (HTTP {response.status_code}): {response.text[:500]}"
            )
        if response.status_code >= 400:
            raise ServerError(
                f"vLLM at {self.base_url} refused {path} (HTTP {response.status_code}): {response.text[:500]}"
            )
        try:
            return response.json()
        except requests.JSONDecodeError as error:
            raise ServerUnavailableError(
                f"what answers {path} at {self.base_url} sends no JSON and seems to be no vLLM: "
                f"{response.text[:100]!r}"
            ) from error

    # --- weights ----------------------------------------------------------------------------------------------------

    def layers(self) -> str:
        """The engine's layers, as text."""
        return self._collective_rpc("get_model_inspection")[0]

    def weight_version(self) -> str:
        """Version of the weights that the server holds; "default" since it started."""
        return self._get(f"{self.base_url}/weight_info")["weight_version"]

    def load_checkpoint(self, directory: str, weight_version: str) -> None:
        """Has the server reload its weights in place from a checkpoint, and forget what it cached with the old ones.

        Args:
            directory: as the server sees it.
            weight_version: what the server calls these weights from now on.
        """
        self._collective_rpc(self._reload_method, weights_path=directory)
        self.reset_prefix_cache()
        self.name_weights(weight_version)

    @cached_property
    def _reload_method(self) -> str:
        return "reload_checkpoint" if is_cpu(self.get_server_info()) else "reload_weights"

    def name_weights(self, weight_version: str) -> None:
        """Has the server call its present weights by this version."""
        self._post(f"{self.base_url}/update_weight_version", json={"new_version": weight_version})

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache.

        Raises:
            ServerUnavailableError: requests of another client hold parts of it.
        """
        # Blocks of a request that has just ended may be held for a moment.
        for _ in range(50):
            if self._post(f"{self.base_url}/reset_prefix_cache")["success"]:
                return
            time.sleep(0.1)
        raise ServerUnavailableError(
            f"vLLM at {self.base_url} cannot empty its prefix cache: requests of another client are running on it"
        )

    def _collective_rpc(self, method: str, **kwargs: Any) -> list:
        return self._post(f"{self.base_url}/collective_rpc", json={"method": method, "kwargs": kwargs})["results"]


_NEVER = Deadline(math.inf)


def wait_until_up(
    url: str, timeout: float, report: Callable[[str], None] = print, retry_interval: float = 1.0
) -> None:
    """Waits until a server is up, and says that it waits.

    Args:
        url: address of the server, "http://127.0.0.1:8000".
        timeout: seconds to wait.
        report: takes a line about what is happening.
        retry_interval: seconds between two looks.

    Raises:
        ServerUnavailableError: it is not up in time.
    """
    begin = time.monotonic()
    reported = begin - 10
    while True:
        try:
            answer = requests.get(f"{url}/health", timeout=min(5.0, timeout + 1))
            reason = f"HTTP {answer.status_code}"
            if answer.status_code == 200:
                return
        except requests.RequestException as error:
            reason = type(error).__name__
        waited = time.monotonic() - begin
        if waited >= timeout:
            raise ServerUnavailableError(
                f"no vLLM server answers at {url} after {timeout:g} s ({reason}): start one with scripts/serve.py, "
                "correct vllm_server_base_url, or raise vllm_server_timeout."
            )
        if time.monotonic() - reported >= 10:
            reported = time.monotonic()
            report(f"waiting for vLLM at {url} ({reason}): {waited:.0f} of {timeout:g} s")
        time.sleep(retry_interval)
