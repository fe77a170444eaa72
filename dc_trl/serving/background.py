"""Work in threads that nobody has to wait for when the process ends."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
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


def in_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in an event loop of its own, also where the caller is within one, as a notebook's cell is.

    Whatever interrupts the caller, Ctrl-C for example, cancels the coroutine and waits for its end.
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
        return future.result()
    except BaseException:
        if not future.done():
            with suppress(RuntimeError):  # the loop is closed, where the coroutine has just ended by itself
                loop.call_soon_threadsafe(task.cancel)
            future.exception()
        raise
