"""Users' own functions, named `module:function`, in place of a registered form or correction."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..settings.users_function import import_function


def is_custom(name: str) -> bool:
    """Return whether a setting names a user's own function, as `module:function`."""
    return ":" in name


def resolve(field: str, name: str, registered: Mapping[str, Callable[..., Any]], **arguments: Any) -> Any:
    """Return the function that a setting names: a registered one, or one of the user's modules.

    Args:
        field: name of the setting, for messages.
        name: name of a registered function, or `module:function` with a module that Python can import.
        registered: registered functions by name.
        arguments: keyword arguments that the function will be called with; its signature has to take them.

    Raises:
        ValueError: the name is unknown, the module cannot be imported, it has no such function, or the function does
            not take the arguments. The message names the setting, its value and the remedy.
    """
    if name in registered:
        return registered[name]
    if not is_custom(name):
        names = ", ".join(map(repr, registered))
        raise ValueError(f"{field}={name!r} is unknown: choose one of {names}, or name a function, 'module:function'.")
    module_name, _, function_name = name.partition(":")
    remedy = "correct the name, install the module, or start from the directory in which it lies"
    function = import_function(f"{field}={name!r}", module_name, function_name, remedy)
    parameters = ["tokens", *arguments]
    try:
        inspect.signature(function).bind(None, **arguments)
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        raise ValueError(
            f"{field}={name!r} is called as {function_name}({', '.join(parameters)}), which it does not take "
            f"({error}): give it these parameters."
        ) from error
    return function
