"""Work in threads that nobody has to wait for when the process ends, and that any thread can end."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from .errors import RequestAbandonedError


T = TypeVar("T")

_lock = threading.Lock()
_cancels: dict[Callable[[], None], object] = {}  # what ends each coroutine that runs, and its owner
_abandoned = threading.Event()  # no request is wanted any more


def in_thread(action: Callable[[], T]) -> "Future[T]":
    """Has a thread of its own do something; what it returns or raises is in the future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="dc_trl-server", daemon=True).start()
    return future


@contextmanager
def in_event_loop(coroutine: Coroutine[Any, Any, T], owner: object = None) -> "Iterator[Future[T]]":
    """A block beside which a coroutine runs, in a thread and an event loop of its own.

    What it returns or raises is in the future, a `RequestAbandonedError` where `abandon_requests` or `end_requests_of`
    its owner has ended it. Whoever leaves the block before its end cancels it, and waits for that.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)

    def cancel() -> None:
        with suppress(RuntimeError):  # the loop is closed, where the coroutine has just ended by itself
            loop.call_soon_threadsafe(task.cancel)

    def run() -> T:
        try:
            return loop.run_until_complete(task)
        except asyncio.CancelledError:
            raise RequestAbandonedError from None
        finally:
            with _lock:
                del _cancels[cancel]
            loop.close()

    with _lock:
        _cancels[cancel] = owner
    if _abandoned.is_set():
        cancel()
    future = in_thread(run)
    try:
        yield future
    finally:
        if not future.done():
            cancel()
            future.exception()


def in_coroutine(coroutine: Coroutine[Any, Any, T], owner: object = None) -> T:
    """Runs a coroutine in an event loop of its own, also where the caller is within one, as a notebook's cell is.

    Whatever interrupts the caller, Ctrl-C for example, cancels the coroutine and waits for its end.

    Raises:
        RequestAbandonedError: see `in_event_loop`.
    """
    with in_event_loop(coroutine, owner) as future:
        return future.result()


def end_requests_of(owner: object) -> None:
    """Ends the coroutines that run for an owner. May be called in any thread."""
    with _lock:
        cancels = [cancel for cancel, of in _cancels.items() if of is owner]
    for cancel in cancels:
        cancel()


def abandon_requests() -> None:
    """Ends all coroutines that run, and all that begin later, until `allow_requests`. May be called in any thread."""
    _abandoned.set()  # first: what begins from now on sees it
    with _lock:
        cancels = list(_cancels)
    for cancel in cancels:
        cancel()


def allow_requests() -> None:
    """Takes `abandon_requests` back."""
    _abandoned.clear()


def pause(seconds: float) -> None:
    """Sleeps, unless requests are abandoned.

    Raises:
        RequestAbandonedError: they are, or were meanwhile.
    """
    if _abandoned.wait(seconds):
        raise RequestAbandonedError
