"""What the processes of a run do together: they agree on a value, and end together where one of them fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object


Result = TypeVar("Result")


def agree(value: Any) -> Any:
    """Return the main process's value on all processes. Every process has to call it."""
    return broadcast_object_list([value])[0]


def on_main_process(action: Callable[[], Result]) -> Result:
    """Run an action on the main process; return its result, or raise its `ValueError`, on all processes."""
    outcome: list = [None, None]
    state = PartialState()
    if state.is_main_process:
        try:
            outcome[0] = action()
        except ValueError as error:
            outcome[1] = str(error)
    if state.num_processes > 1:
        broadcast_object_list(outcome)
    result, refusal = outcome
    if refusal is not None:
        raise ValueError(refusal)
    return result


@contextmanager
def raised_together(*errors: type[Exception]) -> Iterator[None]:
    """Raise these errors of the block on any process on all processes, so that none waits for another."""
    failure = None
    try:
        yield
    except errors as error:
        failure = error
    kinds = [kind for kind in errors if isinstance(failure, kind)]
    failures = gather_object([(kinds[0], str(failure))] if kinds else [])
    if failures:
        kind, message = failures[0]
        raise failure or kind(message)
