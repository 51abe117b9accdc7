"""HTML elements; their content is escaped unless it is an element itself."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


class Html(str):
    """Text that is HTML already."""


Content = str | int | Iterable["Content"]
VOID = ("meta", "input")


def join(*content: Content) -> Html:
    parts: list[str] = []
    for part in content:
        if isinstance(part, Html):
            parts.append(part)
        elif isinstance(part, (str, int)):
            parts.append(escape(str(part)))
        else:
            parts.append(join(*part))
    return Html("".join(parts))


def tag(_name: str, *content: Content, **attributes: str | int | bool | None) -> Html:
    """`class_` means class, `aria_label` aria-label; True gives an attribute without a value, None omits it."""
    written = [_name]
    for key, value in attributes.items():
        if value is not None and value is not False:
            name = key.rstrip("_").replace("_", "-")
            written.append(name if value is True else f'{name}="{escape(str(value))}"')
    return Html(f"<{' '.join(written)}>" + ("" if _name in VOID else f"{join(*content)}</{_name}>"))
