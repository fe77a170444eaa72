"""What is wrong with a vLLM server before it is started or asked: found in a moment, where vLLM takes a minute."""

import re
import socket
from urllib.parse import urlparse

from transformers import PretrainedConfig


_ADDRESS = re.compile(r"https?://[^/\s,]+(/\S*)?$")


def free_port(host: str, port: int) -> int:
    """The port, if it can be listened on; for port 0, one that can.

    Raises:
        ValueError: another process listens there, or the address is none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        # As vLLM does: connections of a server that has ended may linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            return listener.getsockname()[1]
        except OSError as error:
            raise ValueError(
                f"host={host!r}, port={port} cannot be listened on ({error.strerror}): end what uses it, choose "
                "another port, or port 0 for a free one; the host is an address of this machine."
            ) from error


def require_model(model: str, revision: str) -> None:
    """Refuses a name behind which there is no model.

    Raises:
        OSError: neither a directory with a config.json nor a model on the Hub that can be reached.
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
    except ValueError:  # a port that is none
        return False


def require_address(name: str, url: object) -> None:
    """Refuses what is no address of a server.

    Raises:
        ValueError: names the field, its value and the remedy.
    """
    if not _is_address(url):
        raise ValueError(f"{name}={url!r} is no address of a vLLM server: use http://HOST:PORT.")


def require_addresses(name: str, urls: object) -> None:
    """Refuses what is no list of addresses of different servers.

    Raises:
        ValueError: names the field, its value and the remedy.
    """
    if not (isinstance(urls, list) and urls and all(map(_is_address, urls))):
        raise ValueError(
            f"{name}={urls!r} is no list of addresses of vLLM servers: use ['http://HOST:PORT', 'http://HOST:PORT'] "
            f"(in YAML the same, on a command line --{name} http://HOST:PORT http://HOST:PORT)."
        )
    places = [url.rstrip("/") for url in urls]
    if twice := [url for number, url in enumerate(places) if url in places[:number]]:
        raise ValueError(f"{name}={urls!r} names {twice[0]} twice: each server stands once.")


def require_waits_that_fit(limit: float, ddp_timeout: int, processes: int, **waits: float | None) -> None:
    """Refuses waits for a server that are longer than the other processes wait for the one that asks it.

    Args:
        limit: seconds; see `DCGRPOConfig.vllm_time_limit`.
        ddp_timeout: seconds that the limit is a part of.
        processes: how many there are.
        **waits: seconds by the names of their fields; None where a field is not set.

    Raises:
        ValueError: names the field, its value and the remedy.
    """
    for name, wait in waits.items():
        if wait is not None and wait > limit:
            raise ValueError(
                f"{name}={wait:g} with ddp_timeout={ddp_timeout} in {processes} processes: while one asks the server, "
                "the others wait for it no longer than ddp_timeout, of which a tenth is kept for saving the run. Set "
                f"ddp_timeout to {wait * ddp_timeout / limit:.0f} or more, or {name} to {limit:g} or less."
            )
