"""HTTP to a vLLM server: the meaning of its answers, the time limits, and the repetition of requests."""

import asyncio
import math
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlparse

import httpx
import psutil

from ..secrets import require_open_address
from .background import all_of, in_coroutine, pause
from .completions import MALFORMED, require_rollout
from .errors import ServerAnswerError, ServerError, ServerRefusedError, ServerUnavailableError


T = TypeVar("T")

SESSION = "X-Session-ID"  # header by which routers keep the requests of a session on one server
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CONNECT_SECONDS = 10.0
MAX_CONCURRENT = 512  # largest number of concurrent requests; a process may have 1,024 open files by default
_RETRY_STATUSES = (408, 425, 429)  # the HTTP 4xx that mean "later" and not "no"


class Deadline:
    """The time by which a task must be done, with all tries and waits: `seconds` from now, `math.inf` for no limit."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._end - time.monotonic())


class Patience(NamedTuple):
    """How long to wait for a server, and how often to try again."""

    request_timeout: float = 3600.0  # seconds of one request, which may be a generation batch or a reload of weights
    server_timeout: float = 240.0  # seconds to wait until a lost server is up again
    max_retries: int = 0  # tries after the first if the connection broke or the server failed
    time_limit: float = math.inf  # seconds that one task may take with all its tries; less than ddp_timeout
    prefix: str = ""  # prefix of these settings' names in messages


ONE_TRY = Patience()


def seconds_to_next_try(failure: object, failed: int, patience: Patience, deadline: Deadline) -> float:
    """Return the seconds to wait after a number of failed tries; a `ServerUnavailableError` says that none is left."""
    if deadline.left == 0:
        limit = f"ddp_timeout, the other processes wait no longer than {deadline.seconds:g} s"
    elif failed > patience.max_retries:
        limit = f"{patience.prefix}max_retries"
    else:
        return min(2**failed, 30, deadline.left)
    raise ServerUnavailableError(f"{failure} (tried {failed} times: {limit})")


class Connection:
    """HTTP to one vLLM server, for use from threads and from an event loop.

    The API key is read from the environment variable `VLLM_API_KEY`, which `vllm serve` reads too. Threads may share a
    connection if `time_limit` is infinite; otherwise only one task may run at a time.

    Args:
        url: address of the server, "http://127.0.0.1:8000".
        patience: time limits and number of tries of requests.
        report: function that takes a line about what is happening.

    Raises:
        ServerError: the address is not valid.
        ValueError: the address has a password or a query.
    """

    def __init__(self, url: str, patience: Patience = ONE_TRY, report: Callable[[str], None] = print):
        self.url = require_open_address(url, "url").rstrip("/")
        try:
            fits = re.match(r"https?://[^/\s,]", url) and urlparse(url).port != 0
        except ValueError:  # no number, or too large a one
            fits = False
        if not fits or self.url.endswith("/v1"):  # as OpenAI's clients want it
            raise ServerError(f"{url!r} is not an address of a vLLM server: use http://HOST:PORT, without /v1.")
        self.patience = patience
        self.report = report
        self._deadline: Deadline | None = None
        key, netrc = os.environ.get("VLLM_API_KEY"), Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        self._options: dict[str, Any] = {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "auth": httpx.NetRCAuth(str(netrc)) if netrc.is_file() and not key else None,
            # Each request opens a connection: a busy server may close an idle one while a request is on its way to it.
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=0),
            "trust_env": not is_local(self.url),  # proxies are only for other machines
            # httpx limits the wait for each next byte; this class limits whole requests.
            "timeout": httpx.Timeout(None, connect=_CONNECT_SECONDS),
            "verify": httpx.create_ssl_context(),
        }

    @contextmanager
    def task(self, deadline: Deadline | None = None) -> Iterator[Deadline]:
        """Set a deadline for all requests in the block, `time_limit` from now by default; a task within shares it."""
        outer = self._deadline
        self._deadline = outer or deadline or Deadline(self.patience.time_limit)
        try:
            yield self._deadline
        finally:
            self._deadline = outer

    # --- one request ------------------------------------------------------------------------------------------------

    def get(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return self.request("GET", path, **kwargs)

    def request(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        """Return the JSON object that the server answers at a path; **kwargs are those of `httpx.request`.

        Raises:
            ServerUnavailableError: there was no answer in time, or the server failed.
            ServerRefusedError: the server answered HTTP 4xx.
            ServerError: the server requires an API key.
        """
        return in_coroutine(self.arequest(method, path, **kwargs))

    async def complete(self, body: dict[str, Any], vocabulary: int | None) -> list[dict[str, Any]]:
        """Return the completions that answer a body for /v1/completions; see `require_rollout`."""
        # Routers keep a session, which vLLM takes in the body too, on one server.
        headers = {SESSION: body["session_id"]} if "session_id" in body else {}
        answer = await self.arequest("POST", "/v1/completions", json=body, headers=headers)
        return require_rollout(body, answer, self.url, vocabulary)

    def complete_all(self, bodies: Sequence[dict[str, Any]], vocabulary: int | None) -> list[dict[str, Any]]:
        """Return the completions of several concurrent requests in their order; if one fails, the others are ended."""
        room = asyncio.Semaphore(MAX_CONCURRENT)

        async def ask(body: dict[str, Any]) -> list[dict[str, Any]]:
            async with room:
                return await self.complete(body, vocabulary)

        return list(chain.from_iterable(in_coroutine(all_of(map(ask, bodies)))))

    async def arequest(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        """Send a request as `request` does, in an event loop: return its JSON, or raise what its status means."""
        response = await self._answer(method, path, **kwargs)
        status, text = response.status_code, response.text
        if status == 401:
            raise ServerError(f"vLLM at {self.url} asks for an API key: set the variable VLLM_API_KEY to its key.")
        if status == 404 and not path.startswith("/v1"):
            raise ServerRefusedError(
                f"vLLM at {self.url} does not serve {path}: restart it with VLLM_SERVER_DEV_MODE=1 in its "
                "environment. Where that is set, its release of vLLM lacks this path: use 0.31 or later."
            )
        if status >= 400 and "not JSON compliant" in text:
            # JSON has no NaN, so vLLM refuses to send the log-probabilities of broken weights.
            raise ServerUnavailableError(
                f"vLLM at {self.url} computed NaN for {path}: its weights are broken, or the policy has diverged"
            )
        if status >= 500 or status in _RETRY_STATUSES:
            raise ServerUnavailableError(f"vLLM at {self.url} failed at {path} (HTTP {status}): {text[:500]}")
        if status >= 400:
            raise ServerRefusedError(f"vLLM at {self.url} refused {path} (HTTP {status}): {text[:500]}")
        if path.endswith("load_lora_adapter"):  # vLLM answers by a sentence, and not in JSON
            return {"answer": text}
        try:
            return dict(response.json())
        except MALFORMED as error:
            raise ServerUnavailableError(
                f"the server at {self.url} answered {path} without JSON and is probably not vLLM: {text[:100]!r}"
            ) from error

    async def _answer(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        limit = self.patience.request_timeout
        if self._deadline is not None:
            limit = min(limit, self._deadline.left)
        try:
            async with asyncio.timeout(limit):
                return await self._send(method, path, **kwargs)
        except (httpx.TimeoutException, TimeoutError) as error:
            raise ServerUnavailableError(
                f"vLLM at {self.url} did not answer {path} within {limit:.3g} s "
                f"({self.patience.prefix}request_timeout, or what is left of ddp_timeout)"
            ) from error
        except httpx.RequestError as error:
            raise ServerUnavailableError(
                f"the connection to vLLM at {self.url} broke during {path} ({type(error).__name__})"
            ) from error

    async def _send(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async with httpx.AsyncClient(**self._options) as http:
            return await http.request(method, path, **kwargs)

    def text(self, path: str) -> str:
        """Return what the server answers at a path that is not JSON; empty where it has no such path."""
        response = in_coroutine(self._answer("GET", path))
        return response.text if response.is_success else ""

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Turn errors of reading an answer in the block into a `ServerAnswerError`."""
        try:
            yield
        except MALFORMED as error:
            raise ServerAnswerError(
                f"the server at {self.url} answered {path} in another format than vLLM ({type(error).__name__}: "
                f"{error}): check that the address is that of vllm serve, in a supported version."
            ) from error

    # --- tries ------------------------------------------------------------------------------------------------------

    def persist(self, action: Callable[[bool], T]) -> T:
        """Call `persist` with this server."""
        return persist([self], action, self.patience)

    async def apersist(self, action: Callable[[], Awaitable[T]]) -> T:
        """Do the same as `persist` in an event loop, without reports, since many requests fail at once there."""
        deadline, failed = Deadline(self.patience.time_limit), 0
        while True:
            try:
                return await action()
            except ServerUnavailableError as error:
                failed += 1
                seconds = seconds_to_next_try(error, failed, self.patience, deadline)
            await asyncio.sleep(seconds)
            wait = Deadline(self.patience.server_timeout)
            # The next try reports a server that stays away for longer.
            while wait.left > 0 and await self._why_down(5.0) is not None:
                await asyncio.sleep(1.0)

    def why_down(self, timeout: float = 5.0) -> str | None:
        """Return None if the server is up, otherwise a short reason."""
        return in_coroutine(self._why_down(timeout))

    async def _why_down(self, timeout: float) -> str | None:
        try:
            async with asyncio.timeout(timeout):
                status = (await self._send("GET", "/health")).status_code
        except (httpx.RequestError, TimeoutError) as error:
            return type(error).__name__
        return None if status == 200 else f"HTTP {status}"


def wait_until_up(servers: Sequence[Connection], timeout: float, all_needed: bool = False) -> None:
    """Wait until one of the servers is up, or all, and report the wait; else raise a `ServerUnavailableError`."""
    begin = time.monotonic()
    reported = begin - 10
    while True:
        down = {server.url: reason for server in servers if (reason := server.why_down(min(5.0, timeout + 1)))}
        if not down or (len(down) < len(servers) and not all_needed):
            return
        waited = time.monotonic() - begin
        urls, reason = " and ".join(down), ", ".join(dict.fromkeys(down.values()))
        if waited >= timeout:
            remedy = "or correct the address"
            if servers[0].patience.prefix:  # of a run, whose fields these are
                remedy = "correct vllm_server_base_url or vllm_server_base_urls, or raise vllm_server_timeout"
            raise ServerUnavailableError(
                f"no vLLM server answers at {urls} after {timeout:g} s ({reason}): start one with dc-trl serve, "
                f"{remedy}."
            )
        if time.monotonic() - reported >= 10:
            reported = time.monotonic()
            servers[0].report(f"waiting for vLLM at {urls} ({reason}): {waited:.0f} of {timeout:g} s")
        pause(1.0)


def persist(
    servers: Sequence[Connection], action: Callable[[bool], T], patience: Patience, all_needed: bool = False
) -> T:
    """Return the result of an action on servers; try again if it fails with a `ServerUnavailableError`.

    Args:
        servers: servers of which one has to be up before another try, or all if `all_needed`. All tries and the waits
            between them are one task of each. The first one reports them.
        action: function that is told whether this is the first try.
        patience: number of tries, and time limits.

    Raises:
        ServerUnavailableError: no try is left.
        ServerError: another try would not help.
    """
    failed = 0
    with ExitStack() as stack:
        deadline = Deadline(patience.time_limit)
        for server in servers:
            deadline = stack.enter_context(server.task(deadline))
        while True:
            try:
                if failed > 0:
                    wait_until_up(servers, min(patience.server_timeout, deadline.left), all_needed)
                return action(failed == 0)
            except ServerUnavailableError as error:
                failed += 1
                seconds = seconds_to_next_try(error, failed, patience, deadline)
                servers[0].report(f"{error}; try {failed + 1} of {patience.max_retries + 1} follows")
            pause(seconds)


def is_local(url: str) -> bool:
    """Return whether a server's address is one of this machine."""
    host = urlparse(url).hostname or ""
    if host in (*LOOPBACK, "0.0.0.0"):
        return True
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    try:
        return socket.gethostbyname(host) in own
    except OSError:
        return False
