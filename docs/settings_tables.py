"""Sphinx directives that show settings as the code has them: `settings`, `no_effect` and `refused`.

Nothing is copied: fields come from their dataclasses, and each error from a configuration that is made here.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any

import yaml
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from dc_trl import DCGRPOConfig
from dc_trl.settings.contradictions import NO_EFFECT
from dc_trl.settings.fields import Range, allowed_of, declared_default, own_fields


# So that the machine that builds the page has no part in the errors.
MACHINE = {"output_dir": "runs/example", "use_cpu": True, "bf16": False, "report_to": "none"}
# What the text of a help shows as code: values in quotes, names of fields, files.
_CODE = re.compile(r'"[^" ]+"|--[\w-]+|\b[a-z_]+/[\w./-]*\w|\b[a-z]\w*[_.]\w+(?:[._]\w+)*(?:=["\w]*["\w])?', re.ASCII)


def error_of(line: str) -> ValueError:
    """Return the error that a line of settings raises.

    Raises:
        LookupError: the configuration takes them.
    """
    try:
        DCGRPOConfig(**(MACHINE | yaml.safe_load(f"{{{line}}}")))
    except ValueError as error:
        return error
    raise LookupError(f"{line} is not refused: take the line out of the list.")


def _prose(text: str) -> list[nodes.Node]:
    """A text with its code in literals."""
    found, end = [], 0
    for match in _CODE.finditer(text):
        found += [nodes.Text(text[end : match.start()]), nodes.literal(text=match[0])]
        end = match.end()
    return [*found, nodes.Text(text[end:])]


def _table(head: Sequence[str], rows: Iterable[Sequence[list[nodes.Node]]]) -> nodes.table:
    """A table of cells, each of which is a list of inline nodes."""
    lines = [[[nodes.Text(title)] for title in head], *rows]
    first, *others = (
        nodes.row("", *(nodes.entry("", nodes.paragraph("", "", *cell)) for cell in line)) for line in lines
    )
    columns = [nodes.colspec(colwidth=1) for _ in head]
    group = nodes.tgroup("", *columns, nodes.thead("", first), nodes.tbody("", *others), cols=len(head))
    return nodes.table("", group)


class Settings(SphinxDirective):
    """The fields of a dataclass of settings, whose dotted name is the argument."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module, _, name = self.arguments[0].rpartition(".")
        settings = getattr(import_module(module), name)
        rows = []
        own = own_fields(settings)
        for field in (field for field in fields(settings) if field.name in own):
            default = declared_default(field)
            meaning = _prose(field.metadata["help"])
            allowed = allowed_of(settings).get(field.name)
            if isinstance(allowed, Range):
                meaning.append(nodes.Text(f" It is {allowed}."))
            elif isinstance(allowed, tuple):
                meaning.append(nodes.Text(" One of "))
                for choice in allowed:
                    meaning += [nodes.literal(text=str(choice)), nodes.Text(", ")]
                meaning[-1] = nodes.Text(".")
            shown = nodes.Text("not set") if default is None else nodes.literal(text=str(default))
            place = nodes.target("", "", nodes.literal(text=field.name), ids=[f"{name}.{field.name}"])
            rows.append([[place], [shown], meaning])
        return [_table(["field", "default", "meaning"], rows)]


class NoEffectTable(SphinxDirective):
    """The fields that have no effect beside others."""

    def run(self) -> list[nodes.Node]:
        rows = []
        for rule in NO_EFFECT:
            others = [node for name in rule.beside for node in (nodes.literal(text=name), nodes.Text(" "))]
            named = [node for name in rule.named.split() for node in (nodes.literal(text=name), nodes.Text(" "))]
            rows.append([named, others, _prose(f"leave it out, or {rule.remedy}")])
        return [_table(["field", "has no effect because of", "remedy"], rows)]


class Refused(SphinxDirective):
    """Settings that contradict each other, a `DCGRPOConfig` on each line, and the error that each of them raises."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        entries = nodes.definition_list()
        for line in self.content:
            message = nodes.paragraph(text=str(error_of(line)))
            entries += nodes.definition_list_item(
                "", nodes.term("", "", nodes.literal(text=line)), nodes.definition("", message)
            )
        return [entries]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("settings", Settings)
    app.add_directive("no_effect", NoEffectTable)
    app.add_directive("refused", Refused)
    return {"parallel_read_safe": True}
