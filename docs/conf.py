"""Settings of the documentation site: `make docs` builds docs/ into build/docs with Sphinx.

The pages are Markdown that GitHub shows as well (MyST reads it here), with formulas in dollars that the site shows as
MathML: nothing on the site comes from another host.
"""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from dc_trl.version import __version__


sys.path.insert(0, str(Path(__file__).parent))  # where mathml.py and settings_tables.py stand

project = "dc_trl"
author = "the dc_trl authors"
version = release = __version__

extensions = [
    "mathml",
    "myst_parser",
    "settings_tables",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
myst_enable_extensions = ["dollarmath"]
html_math_renderer = "mathml"
exclude_patterns = ["_static"]
# Pages of the site that stand beside the code that makes them.
ELSEWHERE = {
    "results": "scripts/study/RESULTS.md",
    "real_model": "scripts/study/real_model/RESULTS.md",
    "replica": "scripts/engines.md",
    "geometry": "notebooks/geometry.md",
}
for page in ELSEWHERE:
    Path(__file__).with_name(f"{page}.md").touch()
myst_heading_anchors = 3  # links to a heading, as on GitHub
smartquotes = False  # quotes are those of code and of messages

html_theme = "furo"
html_title = "dc_trl"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False

# Docstrings name code in single backticks, as Markdown does.
default_role = "literal"
autodoc_inherit_docstrings = False  # an override without a docstring is TRL's business
autosummary_generate = False  # a table of names; no page for each
autodoc_typehints = "none"  # the docstrings state types where the code alone does not
maximum_signature_line_length = 88


def setup(app: Any) -> None:
    app.connect("source-read", show_elsewhere)
    app.connect("autodoc-process-docstring", read_hugging_face_style, priority=400)  # before napoleon's
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("html-page-context", fit_narrow_screens)


def show_elsewhere(app, docname: str, source: list[str]) -> None:
    """Show the pages of `ELSEWHERE`, let links lead to them, and make the navigation of the list of all pages."""
    if docname in ELSEWHERE:
        file = Path(__file__).parents[1] / ELSEWHERE[docname]
        app.env.note_dependency(str(file))
        source[0] = re.sub(r"\]\((?:\.\./)+docs/", "](", file.read_text(encoding="utf-8"))
    for name, path in ELSEWHERE.items():
        source[0] = source[0].replace(f"](../{path}", f"]({name}.md")
    if docname == "index":  # the list of pages is the navigation too
        for caption, pages in re.findall(r"^## (.+)\n((?:\n|-.*\n)+)", source[0], re.MULTILINE):
            names = "\n".join(re.findall(r"^- \[.*?\]\((\w+)\.md\)", pages, re.MULTILINE))
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{names}\n```\n"
    source[0] = re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", source[0])  # a line does not end before its unit


def fit_narrow_screens(app, pagename: str, templatename: str, context: dict[str, Any], doctree) -> None:
    """Prepare a page for site.css: pictures are links, cells have their heading, and names may break at a sign."""
    body = re.sub(r'<img [^>]*?src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', context.get("body", ""))
    body = re.sub(r'<table class="docutils.*?</table>', label_cells, body, flags=re.DOTALL)
    context["body"] = re.sub(
        r'(?<=<span class="pre">)[^<]+', lambda name: re.sub(r"(?<=\w)([/_.])(?=\w)", r"\1<wbr>", name[0]), body
    )


def label_cells(table: re.Match) -> str:
    """Return a table whose cells have the words at the head of their column."""
    heads = [re.sub(r"<[^>]+>", "", head).strip() for head in re.findall(r"<th\b.*?</th>", table[0], re.DOTALL)]

    def label_row(row: re.Match) -> str:
        labels = iter(heads)
        return re.sub(r"<td\b", lambda cell: f'<td data-label="{next(labels, "")}"', row[0])

    return re.sub(r"<tr\b.*?</tr>", label_row, table[0], flags=re.DOTALL)


def read_hugging_face_style(app, what, name, obj, options, lines: list[str]) -> None:
    """Turns what Sphinx cannot read in a docstring of Hugging Face's style into what it can: links, code, returns."""
    text = re.sub(r"\[(`+)~?([\w.]+)\1\]", r"``\2``", "\n".join(lines))
    text = re.sub(
        r"^```(\w+)\n(.*?)\n```$",
        lambda match: f".. code-block:: {match[1]}\n\n" + re.sub("^", "    ", match[2], flags=re.MULTILINE),
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    # Absolute values are no substitutions.
    text = re.sub(r"(`+[^`]*`+)|\|", lambda match: match[1] or "\\|", text)
    # Napoleon would take the words before a colon for a type.
    text = re.sub(r"^Returns:\n {4}", ":returns: ", text, flags=re.MULTILINE)
    lines[:] = text.split("\n")


def shorten_signature(app, what, name, obj, options, signature, annotation) -> tuple[str, None] | None:
    """A configuration has hundreds of arguments. Its docstring describes those that are its own."""
    if not dataclasses.is_dataclass(obj):
        return None
    return ("(output_dir=None, **fields)" if "output_dir" in obj.__dataclass_fields__ else "(**fields)"), None
