from __future__ import annotations

from whet.report.chart import Html, escape, tag


def test_text_cannot_leave_its_element() -> None:
    hostile = "</p><script>alert(1)</script><p title='\"'>"
    shown = tag("p", hostile, title=hostile)
    assert "<script" not in shown and shown.count("<") == 2 and shown.count(">") == 2
    assert shown.count('"') == 2  # those of the attribute


def test_markup_is_escaped_once() -> None:
    assert escape(escape("<")) == "&lt;"
    assert tag("b", tag("i", "&"), Html("<br>")) == "<b><i>&amp;</i><br></b>"


def test_what_cannot_be_seen_or_encoded_is_spelled_out() -> None:
    shown = escape("a\x00b\u202ec\ud800d\x1b[31m")
    assert shown == r"a\x00b\u202ec\ud800d\x1b[31m"
    shown.encode()
