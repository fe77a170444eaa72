"""Functions of a user's own that a setting names: a reward, a form of the constraint, a correction."""

import inspect
from collections.abc import Callable, Mapping
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


def resolve(field: str, name: str, registered: Mapping[str, Callable[..., Any]], **arguments: Any) -> Any:
    """Return the function that a setting names: a registered one, or `module:function` of the user's.

    Args:
        field: name of the setting, for messages.
        name: value of the setting.
        registered: registered functions by name.
        arguments: keyword arguments that the function will be called with; its signature has to take them.

    Raises:
        ValueError: the name is unknown, there is no such function, or it does not take the arguments.
    """
    if name in registered:
        return registered[name]
    module, colon, function_name = name.partition(":")
    if not colon:
        names = ", ".join(map(repr, registered))
        raise ValueError(f"{field}={name!r} is unknown: choose one of {names}, or name a function, 'module:function'.")
    function = import_function(f"{field}={name!r}", module, function_name, "correct the name, or install the module")
    try:
        inspect.signature(function).bind(None, **arguments)
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        raise ValueError(
            f"{field}={name!r} is called as {function_name}({', '.join(['tokens', *arguments])}), which it does not "
            f"take ({error}): give it these parameters."
        ) from error
    return function
