"""HTTP to a vLLM server: what its answers mean, how long they may take, and when a request is sent again."""

import asyncio
import math
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlparse

import httpx
import psutil

from .background import end_requests_of, in_coroutine, pause
from .errors import (
    RequestAbandonedError,
    ServerAnswerError,
    ServerError,
    ServerRefusedError,
    ServerUnavailableError,
)


T = TypeVar("T")

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CONNECT_SECONDS = 10.0
_AT_ONCE = 512  # requests on their way; a process may have 1,024 files open by default
_TRY_AGAIN = (408, 425, 429)  # of HTTP 4xx, what says "later" and not "no"


class Deadline:
    """When a task has to be done, tries and the waits between them: `seconds` from now, `math.inf` for no limit."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self._end - time.monotonic())


class Patience(NamedTuple):
    """How long a server is waited for, and how often it is asked again."""

    # Seconds that any one request may take, from its connection to the last byte of its answer: a generation batch, a
    # reload of weights.
    request_timeout: float = 3600.0
    server_timeout: float = 240.0  # seconds to wait for a server that went away to be up again
    max_retries: int = 0  # tries after the first, where the connection broke or the server failed
    time_limit: float = math.inf  # seconds that one task may take, with all its tries; a part of ddp_timeout
    prefix: str = ""  # of the names that these settings have for the user


ONE_TRY = Patience()


class Tries:
    """When something that failed is tried again, and when no more."""

    def __init__(self, patience: Patience, deadline: Deadline):
        self._patience = patience
        self._deadline = deadline
        self.made = 0  # tries that failed

    def pause(self, failure: object) -> float:
        """Seconds to wait before the next try: as many as the server asks for, where these are more than ours.

        Raises:
            ServerUnavailableError: there is none; the message has the failure and the limit that was reached.
        """
        self.made += 1
        if self._deadline.left == 0:
            limit = f"ddp_timeout, the other processes wait no longer than these {self._deadline.seconds:g} s"
        elif self.made > self._patience.max_retries:
            limit = f"{self._patience.prefix}max_retries"
        else:
            asked = failure.retry_after if isinstance(failure, ServerUnavailableError) else 0.0
            ours = min(2**self.made, 30)
            return min(max(ours, min(asked, self._patience.server_timeout)), self._deadline.left)
        raise ServerUnavailableError(f"{failure} (tried {self.made} times: {limit})")

    def __str__(self) -> str:
        return f"try {self.made + 1} of {self._patience.max_retries + 1}"


class Connection:
    """HTTP to one vLLM server, for threads and for an event loop.

    The key that the server may ask for is read from the environment variable `VLLM_API_KEY`, which `vllm serve` reads
    too. Threads may share a connection where `time_limit` is infinite; else one task runs at a time.

    Args:
        url: address of the server, "http://127.0.0.1:8000".
        patience: how long and how often the server is asked.
        report: takes a line about what is happening.

    Raises:
        ServerError: the address cannot be read.
    """

    def __init__(self, url: str, patience: Patience = ONE_TRY, report: Callable[[str], None] = print):
        self.url = url.rstrip("/")
        self.patience = patience
        self._report = report
        self._deadline: Deadline | None = None
        key = os.environ.get("VLLM_API_KEY")
        self._options: dict[str, Any] = {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            # A connection for each request: a busy server closes those that are kept alive while it is on its way.
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=0),
            "trust_env": not is_local(self.url),  # proxies are for other machines
            # httpx limits the wait for each next byte; the limits of whole requests are ours.
            "timeout": httpx.Timeout(None, connect=_CONNECT_SECONDS),
            "verify": _certificates(),
        }
        self._closed = False
        try:
            httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ServerError(f"{url!r} is no address of a vLLM server ({error}): use http://HOST:PORT") from error

    def close(self) -> None:
        """Ends what is on its way and sends no more: who asks in another thread gets a RuntimeError."""
        self._closed = True
        end_requests_of(self)

    @contextmanager
    def task(self, deadline: Deadline | None = None) -> Iterator[Deadline]:
        """Has all requests in the block end by a deadline, `time_limit` from now by default.

        A task within a task is a part of it, and has its deadline.
        """
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
        """The JSON that the server answers at a path, "/v1/models" for example; **kwargs are those of `httpx.request`.

        Raises:
            ServerUnavailableError: no answer in time, or one of a server that failed.
            ServerRefusedError: HTTP 4xx.
            ServerError: the server asks for a key.
        """
        return self._read(path, self._response(method, path, **kwargs))

    def response(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """`request`, for who wants the response that the JSON is in."""
        response = self._response(method, path, **kwargs)
        self._read(path, response)
        return response

    def _response(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        left = math.inf if self._deadline is None else self._deadline.left
        if left == 0:
            raise ServerUnavailableError(f"vLLM at {self.url} was not asked for {path}: no time is left for it")
        limit = min(self.patience.request_timeout, left)
        with self._reaching(path, None if limit < left else limit):
            return self._send(limit, method, path, **kwargs)

    def _send(self, limit: float, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """Sends a request, which ends after `limit` seconds: with its answer, or by a TimeoutError."""

        async def send() -> httpx.Response:
            async with asyncio.timeout(limit), self.asynchronous() as http:
                return await http.request(method, path, **kwargs)

        return self._run(send)

    def _run(self, action: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs what asks the server, until this connection is closed."""
        if not self._closed:
            try:
                return in_coroutine(action(), owner=self)
            except RequestAbandonedError:
                if not self._closed:
                    raise
        raise RuntimeError(f"the connection to vLLM at {self.url} is closed")

    def post_all(self, path: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """What the server answers to several requests at once, within the time that one of them may take.

        Raises:
            ServerError: see `request`; the others are given up.
        """
        left = math.inf if self._deadline is None else self._deadline.left
        if left == 0:
            raise ServerUnavailableError(f"vLLM at {self.url} was not asked for {path}: no time is left for it")
        limit = min(self.patience.request_timeout, left)
        room = asyncio.Semaphore(_AT_ONCE)

        async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
            async with room:
                return await self.arequest(http, "POST", path, json=body)

        async def ask_all() -> list[dict[str, Any]]:
            async with asyncio.timeout(limit), self.asynchronous() as http:
                tasks = [asyncio.create_task(ask(http, body)) for body in bodies]
                try:
                    return await asyncio.gather(*tasks)
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)

        with self._reaching(path, None if limit < left else limit):
            return self._run(ask_all)

    def asynchronous(self) -> httpx.AsyncClient:
        """A client for an event loop, to be given to `arequest`."""
        return httpx.AsyncClient(**self._options)

    async def arequest(self, http: httpx.AsyncClient, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        """`request` in an event loop, within `request_timeout`."""
        with self._reaching(path, None):
            async with asyncio.timeout(self.patience.request_timeout):
                response = await http.request(method, path, **kwargs)
        return self._read(path, response)

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """A block that reads an answer, and in which what the answer lacks is an error of the server.

        Raises:
            ServerAnswerError: something is not there, or is of another kind.
        """
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ServerAnswerError(
                f"what answers {path} at {self.url} does not say what vLLM says there ({type(error).__name__}: "
                f"{error}): check that the address is that of vllm serve, in a version that is supported."
            ) from error

    @contextmanager
    def _reaching(self, path: str, left: float | None) -> Iterator[None]:
        """What it means that there is no answer, where `left` seconds were left for it; None: `request_timeout`."""
        try:
            yield
        except (httpx.TimeoutException, TimeoutError) as error:
            setting = f"{self.patience.prefix}request_timeout={self.patience.request_timeout:g} s"
            allowed = setting if left is None else f"the {left:.3g} s that were left for it"
            raise ServerUnavailableError(f"vLLM at {self.url} did not answer {path} within {allowed}") from error
        except httpx.ConnectError as error:
            raise ServerUnavailableError(
                f"no connection to vLLM at {self.url} (it broke during {path}: ConnectError)"
            ) from error
        except httpx.RequestError as error:
            raise ServerUnavailableError(
                f"the connection to vLLM at {self.url} broke during {path} ({type(error).__name__})"
            ) from error

    def _read(self, path: str, response: httpx.Response) -> dict[str, Any]:
        """The JSON of an answer, or what it means that there is none."""
        status, text = response.status_code, response.text
        if status == 401:
            raise ServerError(
                f"vLLM at {self.url} asks for an API key: set the environment variable VLLM_API_KEY to its key."
            )
        if status == 404 and path.endswith("/render"):
            raise ServerRefusedError(f"vLLM at {self.url} does not serve {path}: restart it with --enable-scale-out.")
        if status == 404 and not path.startswith("/v1"):
            raise ServerRefusedError(
                f"vLLM at {self.url} does not serve {path}: restart it with VLLM_SERVER_DEV_MODE=1 in its environment."
            )
        if status >= 400 and "not JSON compliant" in text:
            # JSON has no NaN, so that vLLM refuses to send the log-probabilities of broken weights.
            raise ServerUnavailableError(
                f"vLLM at {self.url} computed NaN for {path}: its weights are broken, or the policy has diverged"
            )
        if status >= 500 or status in _TRY_AGAIN:
            after = response.headers.get("Retry-After", "")
            raise ServerUnavailableError(
                f"vLLM at {self.url} failed at {path} (HTTP {status}): {text[:500]}",
                retry_after=float(after) if after.isdecimal() else 0.0,
            )
        if status >= 400:
            raise ServerRefusedError(f"vLLM at {self.url} refused {path} (HTTP {status}): {text[:500]}")
        try:
            answer = response.json()
        except (ValueError, RecursionError) as error:
            raise ServerUnavailableError(
                f"what answers {path} at {self.url} sends no JSON and seems to be no vLLM: {text[:100]!r}"
            ) from error
        if not isinstance(answer, dict):
            raise ServerAnswerError(
                f"what answers {path} at {self.url} sends no JSON object and seems to be no vLLM: {text[:100]!r}"
            )
        return answer

    # --- tries ------------------------------------------------------------------------------------------------------

    def persist(self, action: Callable[[bool], T], patience: Patience | None = None) -> T:
        """`persist` with this server, and with the connection's own patience by default."""
        patience = patience or self.patience
        with self.task() as deadline:
            return persist(action, patience, deadline, self.wait_until_up, self._report)

    async def apersist(self, http: httpx.AsyncClient, action: Callable[[], Awaitable[T]]) -> T:
        """`persist` in an event loop, and silent: many requests fail at once there."""
        tries = Tries(self.patience, Deadline(self.patience.time_limit))
        while True:
            try:
                return await action()
            except ServerUnavailableError as error:
                seconds = tries.pause(error)
            await asyncio.sleep(seconds)
            wait = Deadline(self.patience.server_timeout)
            while wait.left > 0:  # a server that stays away for longer is met by the next try
                with suppress(httpx.RequestError, TimeoutError):
                    async with asyncio.timeout(5.0):
                        if (await http.get("/health")).status_code == 200:
                            break
                await asyncio.sleep(1.0)

    def why_down(self, timeout: float = 5.0) -> str | None:
        """None where the server is up, else in a word what it is that is not."""
        try:
            status = self._send(timeout, "GET", "/health").status_code
        except (httpx.RequestError, TimeoutError) as error:
            return type(error).__name__
        return None if status == 200 else f"HTTP {status}"

    def wait_until_up(self, timeout: float, interval: float = 1.0) -> None:
        """See `wait_until_one_is_up`, of this server."""
        wait_until_one_is_up([self], timeout, interval, self._report)


def wait_until_one_is_up(
    servers: Sequence[Connection], timeout: float, interval: float, report: Callable[[str], None]
) -> None:
    """Waits until one of the servers is up, with `interval` seconds between two looks, and says that it waits.

    Raises:
        ServerUnavailableError: none is up within `timeout` seconds.
    """
    begin = time.monotonic()
    reported = begin - 10
    setting = "vllm_server_base_url" if len(servers) == 1 else "vllm_server_base_urls"
    while None not in (reasons := dict.fromkeys(server.why_down(min(5.0, timeout + 1)) for server in servers)):
        waited = time.monotonic() - begin
        urls, reason = " and ".join(server.url for server in servers), ", ".join(map(str, reasons))
        if waited >= timeout:
            raise ServerUnavailableError(
                f"no vLLM server answers at {urls} after {timeout:g} s ({reason}): start one with "
                f"dc-trl serve, correct {setting}, or raise vllm_server_timeout."
            )
        if time.monotonic() - reported >= 10:
            reported = time.monotonic()
            report(f"waiting for vLLM at {urls} ({reason}): {waited:.0f} of {timeout:g} s")
        pause(interval)


def persist(
    action: Callable[[bool], T],
    patience: Patience,
    deadline: Deadline,
    wait_until_up: Callable[[float], None],
    report: Callable[[str], None],
) -> T:
    """Result of an action on servers, tried again where it fails with a `ServerUnavailableError`.

    Args:
        action: is told whether this is the first try.
        patience: how often it is tried.
        deadline: of all tries and the waits between them.
        wait_until_up: waits, so many seconds at most, for what has to be there before the next try.
        report: takes a line about what is happening.

    Raises:
        ServerUnavailableError: no try is left.
        ServerError: trying again would not help.
    """
    tries = Tries(patience, deadline)
    while True:
        try:
            if tries.made > 0:
                wait_until_up(min(patience.server_timeout, deadline.left))
            return action(tries.made == 0)
        except ServerUnavailableError as error:
            seconds = tries.pause(error)
            report(f"{error}; {tries} follows")
        pause(seconds)


@cache
def _certificates() -> ssl.SSLContext:
    """Whom we trust, read from the disk once and not for each request."""
    return httpx.create_ssl_context()


def is_local(url: str) -> bool:
    """Whether a server's address is one of this machine."""
    host = urlparse(url).hostname or ""
    if host in (*LOOPBACK, "0.0.0.0"):
        return True
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    try:
        return socket.gethostbyname(host) in own
    except OSError:
        return False
