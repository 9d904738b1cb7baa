"""HTML that cannot be broken into: every string is escaped on its way in, unless it is `Html` already.

Used by `chart`, `sections` and `page`. Tags are closed by construction, so no text, however hostile, can open or
close one; control characters are made visible by `printable` before they are escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from whet.text import printable

VOID = frozenset({"meta"})
"""Elements without content."""


class Html(str):
    """Markup that is safe as it stands."""

    __slots__ = ()


def escape(text: str) -> Html:
    """
    >>> escape('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    return text if isinstance(text, Html) else Html(html.escape(printable(text), quote=True))


def join(parts: Iterable[str], between: str = "") -> Html:
    return Html(between.join(escape(part) for part in parts))


def tag(name: str, /, *children: str, **attributes: str | float) -> Html:
    """
    >>> tag("p", "a < b", class_="note", data_step=3)
    '<p class="note" data-step="3">a &lt; b</p>'
    """
    pairs = ((key.rstrip("_").replace("_", "-"), str(value)) for key, value in attributes.items())
    opening = "".join(f' {key}="{escape(value)}"' for key, value in pairs)
    if name in VOID:
        assert not children
        return Html(f"<{name}{opening}>")
    return Html(f"<{name}{opening}>{join(children)}</{name}>")
