"""The help of `dc-trl train`: fields by group, each on a line or two; one field, or all of them, in full."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from transformers.hf_argparser import string_to_bool

from .command_line import METAVARS, unknown_field


# Titles, each with the names of its fields.
Groups = Mapping[str, Iterable[str]]

_METAVARS = METAVARS | {string_to_bool: "BOOL"}
_INDENT = 28  # columns in front of a field's help


class FieldHelp(argparse.Action):
    """The option `--help`: alone it shows the groups of fields, with `all` every field, with a name that field.

    Args:
        options: of argparse's actions, and `groups`.
    """

    def __init__(self, option_strings: list[str], dest: str, groups: Groups, **options: Any):
        super().__init__(option_strings, argparse.SUPPRESS, nargs="?", const="", default=argparse.SUPPRESS, **options)
        self._groups = groups

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        actions = {action.dest: action for action in reversed(parser._actions)}  # --no_NAME comes after --NAME
        if values == "all":
            lines = [line for name in actions if name != self.dest for line in _lines(actions[name], in_full=True)]
        elif values:
            if values not in actions:
                raise ValueError(unknown_field(values, actions))
            lines = _lines(actions[values], in_full=True)
        else:
            lines = [f"usage: {parser.usage}", *_lines(actions["config"])]
            for title, names in self._groups.items():
                lines += ["", f"{title}:", *(line for name in names for line in _lines(actions[name]))]
            lines += ["", f"--help all lists all {len(actions) - 1} fields, --help NAME describes one in full."]
        print("\n".join(lines))
        parser.exit()


def _lines(action: argparse.Action, in_full: bool = False) -> list[str]:
    """Return what an option means, its {choices} and its [default]: in at most two lines, or with the whole help."""
    meaning = " ".join((action.help or "").replace("%%", "%").split())
    choices = ", ".join(map(str, action.choices or ()))
    if not in_full:
        choices = textwrap.shorten(choices, 60, placeholder=" …")
    facts = f" {{{choices}}}" if choices else ""
    if action.default not in (None, [], argparse.SUPPRESS):
        facts += f" [{', '.join(action.default) if isinstance(action.default, list) else action.default}]"
    name = f"  --{action.dest}" + ("" if action.choices else f" {_METAVARS.get(action.type, 'TEXT')}")
    room = max(shutil.get_terminal_size((120, 24)).columns, 80)
    if not in_full:
        # The first sentence without what is in parentheses.
        meaning = re.split(r"(?<!e\.g)(?<!i\.e)[.:;] ", re.sub(r" \([^()]*\)", "", meaning))[0].rstrip(".")
        meaning = textwrap.shorten(meaning, max(2 * (room - _INDENT) - len(facts) - 16, 30), placeholder=" …")
    first = name.ljust(_INDENT - 2) + "  "
    return textwrap.wrap(first + meaning + facts, room, subsequent_indent=" " * _INDENT)
