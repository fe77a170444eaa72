"""Checks of what a user says about vLLM servers, before one is asked."""

import re
from collections.abc import Sequence


_ADDRESS = re.compile(r"https?://[^/\s,]+(/\S*)?$")


def require_addresses(name: str, urls: Sequence[str]) -> None:
    """Refuse what is not the address of a server, and servers that are named twice.

    Raises:
        ValueError: a value is refused; the message names the field, its value and the remedy.
    """
    places = [str(url).rstrip("/") for url in urls]
    for url in urls or [""]:
        if not _ADDRESS.match(str(url)):
            raise ValueError(f"{name}={url!r} is not an address of a vLLM server: use http://HOST:PORT.")
        if places.count(url.rstrip("/")) > 1:
            raise ValueError(f"{name}={urls!r} names {url} twice: name each server once.")


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
