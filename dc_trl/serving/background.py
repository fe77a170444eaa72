"""Work in threads that do not delay the end of the process, and that any thread can end."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from .errors import RequestAbandonedError


T = TypeVar("T")

_lock = threading.Lock()
_running: set[Future[Any]] = set()  # coroutines that run
_abandoned = threading.Event()  # set while requests are abandoned


def in_thread(action: Callable[[], T]) -> "Future[T]":
    """Run an action in a thread of its own; the future holds its result or error."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # raised where the result is read
            future.set_exception(error)

    threading.Thread(target=run, name="dc_trl-server", daemon=True).start()
    return future


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    in_thread(loop.run_forever)
    return loop


os.register_at_fork(after_in_child=_event_loop.cache_clear)  # the thread does not exist there


@contextmanager
def in_event_loop(coroutine: Coroutine[Any, Any, T]) -> "Iterator[Future[T]]":
    """Run a coroutine beside the block, in an event loop of another thread; the future holds its result or error.

    Leaving the block before the coroutine has ended cancels it.

    Raises:
        RequestAbandonedError: `abandon_requests` ended the coroutine, and the block read its result.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, _event_loop())
    with _lock:
        _running.add(future)
    if _abandoned.is_set():
        future.cancel()
    try:
        yield future
    except CancelledError:
        raise RequestAbandonedError from None
    finally:
        future.cancel()
        with _lock:
            _running.remove(future)


def in_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop of its own, even if the caller is within one, such as a notebook's cell.

    An interruption of the caller, such as Ctrl-C, cancels the coroutine. Errors are those of `in_event_loop`.
    """
    with in_event_loop(coroutine) as future:
        return future.result()


async def all_of(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of coroutines that run together. If one fails, the others are cancelled and waited for."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def abandon_requests() -> None:
    """End all coroutines that run, and all that begin before `allow_requests`. Any thread may call this."""
    _abandoned.set()  # comes first, so that coroutines that begin from now on see it
    with _lock:
        running = list(_running)
    for future in running:
        future.cancel()


def allow_requests() -> None:
    """Undo `abandon_requests`."""
    _abandoned.clear()


def pause(seconds: float) -> None:
    """Sleep, unless requests are abandoned.

    Raises:
        RequestAbandonedError: requests were abandoned before or during the sleep.
    """
    if _abandoned.wait(seconds):
        raise RequestAbandonedError
