"""HTML in which text cannot become markup: every string is escaped, only `tag` makes elements."""

from __future__ import annotations

import html
import json
from typing import Any, Iterable, Sequence

from fairseq_dpq.printable import printable


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *children: Any, **attributes: Any) -> Markup:
    """An element. A trailing underscore of an attribute is dropped: class_, for_."""
    text = "".join(
        f' {_attribute(key)}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = join(children)
    if name in ("img", "input", "meta"):
        return Markup(f"<{name}{text}>")
    return Markup(f"<{name}{text}>{inner}</{name}>")


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def join(children: Iterable[Any]) -> Markup:
    """Children one after the other; None is left out."""
    return Markup(
        "".join(
            child if isinstance(child, Markup) else html.escape(str(child))
            for child in children
            if child is not None
        )
    )


def symbol(text: str, class_: str | None = None) -> Markup:
    """A symbol of a dictionary, in its own direction of writing."""
    return tag("bdi", printable(text), class_=class_)


def table(rows: Sequence[Sequence[Any]], class_: str | None = None) -> Markup:
    """The first row is the head. A row may be an element already."""
    head, *body = rows
    return tag(
        "div",
        tag(
            "table",
            tag("thead", tag("tr", *(tag("th", cell) for cell in head))),
            tag(
                "tbody",
                *(
                    row
                    if isinstance(row, Markup)
                    else tag(
                        "tr",
                        *(
                            cell
                            if isinstance(cell, Markup) and cell.startswith("<td")
                            else tag("td", cell)
                            for cell in row
                        ),
                    )
                    for row in body
                ),
            ),
            class_=class_,
        ),
        class_="scroll",
    )


def json_script(identifier: str, value: Any) -> Markup:
    """Data for the page's script. Without `<` no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return Markup(f'<script type="application/json" id="{identifier}">{text}</script>')
