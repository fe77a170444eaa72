"""The page that reports are made of: what a browser, a phone and a stranger's text do to it."""

import base64
import io
import random
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from dc_trl.report.figures import moving_average, new_figure
from dc_trl.report.html import Page, page_generator


VOID = {"meta", "img", "wbr"}


class Reader(HTMLParser):
    """Elements with their attributes and texts, read by Python's own parser; unbalanced tags are errors."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
        if tag not in VOID:
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open:
            self.texts[self._open[-1]][-1] += data
            if self._open[-1] in ("th", "td"):
                self.rows[-1][-1] += data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def read_page(page: Page) -> Reader:
    return Reader(page.html())


def make_figure(points=5, width=4.8):
    figure, (axes,) = new_figure(width=width)
    rng = random.Random(0)
    axes.plot([rng.random() for _ in range(points)])
    return figure


def require_self_contained(reader: Reader) -> None:
    """Nothing in the page makes a browser ask for anything or run anything."""
    assert not {"script", "link", "iframe", "object", "embed", "base", "form", "svg"} & {t for t, _ in reader.elements}
    for _, attributes in reader.elements:
        assert not {"href", "srcset", "action"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("src", "data:").startswith("data:")
    (style,) = reader.texts["style"]
    assert "url(" not in style
    assert "@import" not in style
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_a_page_has_what_it_was_given_in_order():
    assert Page("T").html().startswith('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">')
    page = Page("Title", "below it")
    page.heading("First")
    page.text("A paragraph.")
    page.table(["name", "a", "b"], [["x", "1", "2"], ["y", "3", "4"]], "Numbers")
    page.figure(make_figure(), "left", "a line")
    page.figure(make_figure(), "right")
    page.heading("Second")
    reader = read_page(page)
    require_self_contained(reader)
    (policy,) = [meta["content"] for meta in reader.all("meta") if "http-equiv" in meta]
    assert "default-src 'none'" in policy
    assert reader.rows == [["name", "a", "b"], ["x", "1", "2"], ["y", "3", "4"]]
    assert reader.texts["h1"] == ["Title"]
    assert reader.texts["h2"] == ["First", "Second"]
    assert reader.texts["p"] == ["below it", "A paragraph.", "Numbers"]
    assert reader.texts["figcaption"] == ["left", "right"]
    assert [image["alt"] for image in reader.all("img")] == ["a line", "right"]
    # Both figures stand in one row.
    assert [a.get("class") for a in reader.all("div")] == ["tables", "wide", "table", "figures"]
    assert [a["scope"] for a in reader.all("th")] == ["col", "col", "col", "row", "row"]


def test_tables_of_names_and_values_share_a_row_and_wide_ones_become_lists():
    page = Page("T")
    page.table(["", ""], [["a", "1"]])
    page.table(["name", "value"], [["b", "2"]])
    page.table(["engine", "x", "y", "z", "w"], [["c", "3", "4", "5", "6"]])
    reader = read_page(page)
    classes = [attributes.get("class") for attributes in reader.all("div")]
    assert classes == ["tables", "pairs", "table", "pairs", "table", "wide", "table"]
    assert [attributes.get("class") for attributes in reader.all("table")] == [None, None, "list"]
    assert len(reader.all("thead")) == 2  # nothing stands for a header that says nothing
    # A phone shows the columns' names beside the cells.
    assert [cell["data-label"] for cell in reader.all("td")] == ["", "value", "x", "y", "z", "w"]


@given(st.text(max_size=40))
@example("<script>alert(1)</script>")
@example('"><img src=x onerror=alert(1)></style>&amp;')
@settings(max_examples=30)
def test_text_of_any_kind_stays_text(text):
    page = Page(text, text, generator=text)
    page.heading(text)
    page.table([text, "a"], [[text, text]], text)
    reader = read_page(page)
    require_self_contained(reader)
    allowed = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)
    assert reader.texts["title"] == reader.texts["h1"] == reader.texts["h2"] == [allowed]
    assert reader.rows == [[allowed, "a"], [allowed, allowed]]
    page.html().encode()  # a lone surrogate would raise


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="has 1 cells and the header 2"):
        Page("T").table(["a", "b"], [["x"]])


def image_of(page: Page) -> tuple[str, bytes]:
    (image,) = read_page(page).all("img")
    kind, data = re.fullmatch(r"data:image/([\w+]+);base64,(.*)", image["src"]).groups()
    return kind, base64.b64decode(data, validate=True)


def test_few_points_are_drawn_sharp_and_many_do_not_make_the_page_large():
    page = Page("T")
    page.figure(make_figure(), "few")
    kind, data = image_of(page)
    assert kind == "svg+xml"
    root = ElementTree.fromstring(data)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert b"fill: #ffffff" not in data  # no background either
    assert b"font-family" not in data  # letters are outlines: no font of the reader's is needed

    page = Page("T")
    page.figure(make_figure(points=100_000), "many")
    kind, data = image_of(page)
    assert kind == "png"
    assert len(data) < 500_000
    image = Image.open(io.BytesIO(data))
    assert image.width >= 1000
    assert image.getpixel((0, 0))[3] == 0  # no background: in dark mode the page's own shows through


def test_the_generator_is_found_in_our_pages_only(tmp_path):
    Page("T", generator='a & "b"').save(tmp_path / "ours.html")
    (tmp_path / "other.html").write_text("<!DOCTYPE html>\n<html><meta name='generator' content='x'></html>")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "empty").touch()
    found = {path.name: page_generator(path) for path in tmp_path.iterdir()}
    assert found == {"ours.html": 'a & "b"', "other.html": None, "binary": None, "empty": None}


@given(st.lists(st.floats(-1e6, 1e6), max_size=40), st.integers(0, 6))
def test_a_moving_average_is_the_mean_of_its_window(values, half):
    found = moving_average(values, 2 * half + 1)
    expected = []
    for i in range(len(values)):
        window = [values[j] for j in range(len(values)) if abs(i - j) <= half]
        expected.append(sum(window) / len(window))
    assert found == pytest.approx(expected, abs=1e-6)
