from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from whet.report.page import Html, Line, chart, escape, tag, ticks


def draw(lines: list[Line], **options: object) -> str:
    show = "{:g}".format
    return chart(lines, title="Accuracy", x_label="tokens", x_show=show, y_show=show, **options)  # type: ignore[arg-type]


def test_points_are_where_they_belong() -> None:
    shown = draw([Line(label="a", colour=1, curve=[(0, 0.0), (50, 0.5), (100, 1.0)])])
    assert '<path d="M0.0 1000.0L500.0 500.0L1000.0 0.0" class="line c1"></path>' in shown
    assert re.findall(r'class="y" style="bottom:([\d.]+)%">([\d.]+)<', shown)[-1] == ("100.00", "1")
    assert re.findall(r'class="x" style="left:([\d.]+)%">(\d+)<', shown)[1] == ("20.00", "20")


def test_each_line_has_its_name_and_each_dot_its_numbers() -> None:
    shown = draw([Line(label=f"arm {i}", colour=i, curve=[(0, 0.2), (8, 0.6)], dots=[(8, 0.6)]) for i in range(3)])
    assert all(f"</svg>arm {i}</li>" in shown for i in range(3))
    assert "<title>arm 2: 0.6 at 8</title>" in shown


def test_nothing_to_draw_is_said() -> None:
    assert "Nothing was recorded" in draw([])
    assert "Nothing was recorded" in draw([Line(label="a", colour=0, curve=[])])


def test_one_point_and_a_flat_line_are_drawn() -> None:
    for curve in ([(0.0, 0.0)], [(5.0, 0.3)], [(0.0, 0.3), (10.0, 0.3)]):
        shown = draw([Line(label="a", colour=0, curve=curve)])
        assert 'class="line c0"' in shown and "nan" not in shown


@example(-13.6, 2597.7, 3)
@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(3, 9))
def test_ticks_span_the_range_and_are_few(low: float, span: float, most: int) -> None:
    marks = ticks(low, low + span, most)
    slack = 1e-6 * max(abs(low), span)
    assert marks[0] <= low + slack and marks[-1] >= low + span - slack
    assert 1 <= len(marks) <= most
    assert marks == sorted(marks)


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
