"""The page of a run as one HTML file, without scripts, requests and fonts from elsewhere."""

import base64
import io
import re
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure


_DPI = 220  # sharp in print


def _valid(value: Any) -> Any:
    """Replace control characters, which HTML does not allow even where they are escaped."""
    if not isinstance(value, str):
        return value
    return type(value)(re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", value))


_TEMPLATES = Environment(
    loader=PackageLoader("dc_trl.report"),
    autoescape=True,
    finalize=_valid,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def page_html(**content: Any) -> str:
    """Return the page of this content, which `templates/page.html` names. All text is escaped."""
    return _TEMPLATES.get_template("page.html").render(content)


def image_source(figure: Figure) -> str:
    """Return a figure as the address of an image that holds all of it: a PNG without background.

    In dark mode the browser inverts its lightness and keeps its hues.
    """
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DPI, transparent=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
