"""Functions of a user's own that a setting names: a reward, a form of the constraint, a correction."""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def import_function(setting: str, module: str, function: str, remedy: str) -> Callable[..., Any]:
    """Return a function of a module that Python can import.

    Raises:
        ValueError: there is no such module or function; the message begins with `setting` and ends with `remedy`.
    """
    try:
        found = getattr(import_module(module), function, None)
    except (ImportError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"{setting}: the module {module!r} cannot be imported ({error}): {remedy}.") from error
    if not callable(found):
        raise ValueError(f"{setting}: {module} has no function {function!r}: {remedy}.")
    return found


def resolve(field: str, name: str, registered: Mapping[str, Callable[..., Any]], **arguments: Any) -> Any:
    """Return the function that a setting names: a registered one, or `module:function` of the user's.

    Raises:
        ValueError: the name is unknown, or the function cannot be called with the sampled tokens and `arguments`.
    """
    module, colon, function_name = name.rpartition(":")
    if not colon and name not in registered:
        names = ", ".join(map(repr, registered))
        raise ValueError(f"{field}={name!r} is unknown: choose one of {names}, or name a function, 'module:function'.")
    remedy = "correct the name, or install the module"
    function = import_function(f"{field}={name!r}", module, function_name, remedy) if colon else registered[name]
    try:
        inspect.signature(function).bind(None, **arguments)
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        raise ValueError(
            f"{field}={name!r} is called as {function_name}({', '.join(['tokens', *arguments])}), which it does not "
            f"take ({error}): give it these parameters, or leave their settings out."
        ) from error
    return function
