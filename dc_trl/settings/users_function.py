"""Functions of a user's own that a setting names: a reward, a form of the constraint, a correction."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def import_function(setting: str, module: str, function: str, remedy: str) -> Callable[..., Any]:
    """Return a function of a module that Python can import.

    Args:
        setting: name and value of the setting, for the message.
        module: dotted name of the module.
        function: name of the function in it.
        remedy: what to do where there is no such function, for the message.

    Raises:
        ValueError: the module cannot be imported, or has no such function.
    """
    try:
        found = getattr(import_module(module), function, None)
    except (ImportError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"{setting}: the module {module!r} cannot be imported ({error}): {remedy}.") from error
    if not callable(found):
        raise ValueError(f"{setting}: {module} has no function {function!r}: {remedy}.")
    return found
