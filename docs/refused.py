"""A Sphinx directive, `refused`: settings that contradict each other, and the error that each of them raises.

A line of its content holds the fields of one `DCGRPOConfig`, as in a YAML mapping. The error is not copied from the
source: the configuration is made, and what it raises is shown below the line.
"""

from typing import Any

import yaml
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from dc_trl import DCGRPOConfig


# So that the machine that builds the page has no part in the errors.
MACHINE = {"output_dir": "runs/example", "use_cpu": True, "bf16": False, "report_to": "none"}


def error_of(line: str) -> ValueError:
    """The error that a line of settings raises.

    Raises:
        LookupError: the configuration takes them.
    """
    try:
        DCGRPOConfig(**(MACHINE | yaml.safe_load(f"{{{line}}}")))
    except ValueError as error:
        return error
    raise LookupError(f"{line} is not refused: take the line out of the list.")


class Refused(SphinxDirective):
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
    app.add_directive("refused", Refused)
    return {"parallel_read_safe": True}
