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
