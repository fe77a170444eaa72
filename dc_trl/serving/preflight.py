"""Quick checks for a vLLM server before it is started or asked, since vLLM itself takes a minute to fail."""

import re
import socket
from urllib.parse import urlparse

from transformers import PretrainedConfig


_ADDRESS = re.compile(r"https?://[^/\s,]+(/\S*)?$")


def free_port(host: str, port: int) -> int:
    """Return the port if it can be listened on; for port 0, return a free one.

    Raises:
        ValueError: another process listens on the port, or the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        # vLLM sets this too, since connections of a server that has ended may linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            return listener.getsockname()[1]
        except OSError as error:
            raise ValueError(
                f"host={host!r}, port={port} cannot be listened on ({error.strerror}): end the process that uses the "
                "port, choose another one, or port 0 for a free one; the host must be an address of this machine."
            ) from error


def require_model(model: str, revision: str) -> None:
    """Refuse a name that does not belong to a model.

    Raises:
        OSError: the name is neither a directory with a config.json nor a reachable model on the Hub.
    """
    try:
        config, _ = PretrainedConfig.get_config_dict(model, revision=revision)
        reason = "it has no config.json"
    except (OSError, ValueError) as error:
        config, reason = {}, str(error).strip().splitlines()[0]
    if not config:
        raise OSError(
            f"model={model!r} (revision {revision!r}) cannot be loaded: {reason.rstrip('.')}. Give the Hub id of "
            "a model, or a directory with one."
        )


def _is_address(url: object) -> bool:
    if not (isinstance(url, str) and _ADDRESS.match(url)):
        return False
    try:
        parts = urlparse(url)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # the port is not a valid number
        return False


def require_address(name: str, url: object) -> None:
    """Refuse a value that is not the address of a server.

    Raises:
        ValueError: the value is refused; the message names the field, its value and the remedy.
    """
    if not _is_address(url):
        raise ValueError(f"{name}={url!r} is not an address of a vLLM server: use http://HOST:PORT.")


def require_addresses(name: str, urls: object) -> None:
    """Refuse a value that is not a list of addresses of different servers.

    Raises:
        ValueError: the value is refused; the message names the field, its value and the remedy.
    """
    if not (isinstance(urls, list) and urls and all(map(_is_address, urls))):
        raise ValueError(
            f"{name}={urls!r} is no list of addresses of vLLM servers: use ['http://HOST:PORT', 'http://HOST:PORT'] "
            f"(in YAML the same, on a command line --{name} http://HOST:PORT http://HOST:PORT)."
        )
    places = [url.rstrip("/") for url in urls]
    if twice := [url for number, url in enumerate(places) if url in places[:number]]:
        raise ValueError(f"{name}={urls!r} names {twice[0]} twice: name each server once.")


def require_waits_that_fit(limit: float, ddp_timeout: int, processes: int, **waits: float | None) -> None:
    """Refuse waits for a server that exceed the time that the other processes wait for the one that asks it.

    Args:
        limit: longest allowed wait in seconds; see `DCGRPOConfig.vllm_time_limit`.
        ddp_timeout: seconds from which the limit is derived.
        processes: number of processes.
        **waits: waits in seconds by the names of their fields; None for a field that is not set.

    Raises:
        ValueError: a wait is refused; the message names the field, its value and the remedy.
    """
    for name, wait in waits.items():
        if wait is not None and wait > limit:
            raise ValueError(
                f"{name}={wait:g} with ddp_timeout={ddp_timeout} in {processes} processes: while one asks the server, "
                "the others wait for it no longer than ddp_timeout, of which a tenth is kept for saving the run. Set "
                f"ddp_timeout to {wait * ddp_timeout / limit:.0f} or more, or {name} to {limit:g} or less."
            )
