"""Reads a page of HTML as a browser does, and looks for what a page of ours must not hold."""

from html.parser import HTMLParser


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
