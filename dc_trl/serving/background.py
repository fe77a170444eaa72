"""Work in threads that nobody has to wait for when the process ends."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar


T = TypeVar("T")


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
def in_event_loop(coroutine: Coroutine[Any, Any, T]) -> "Iterator[Future[T]]":
    """A block beside which a coroutine runs, in a thread and an event loop of its own.

    What it returns or raises is in the future. Whoever leaves the block before its end cancels it, and waits for that.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)

    def run() -> T:
        try:
            return loop.run_until_complete(task)
        finally:
            loop.close()

    future = in_thread(run)
    try:
        yield future
    finally:
        if not future.done():
            with suppress(RuntimeError):  # the loop is closed, where the coroutine has just ended by itself
                loop.call_soon_threadsafe(task.cancel)
            future.exception()


def in_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in an event loop of its own, also where the caller is within one, as a notebook's cell is.

    Whatever interrupts the caller, Ctrl-C for example, cancels the coroutine and waits for its end.
    """
    with in_event_loop(coroutine) as future:
        return future.result()
