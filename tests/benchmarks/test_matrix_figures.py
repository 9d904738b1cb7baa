"""Figures of a matrix: they stand alone, repeat, and tell their lines apart."""

import xml.etree.ElementTree as ElementTree
from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st
from matrix_figures import FigureLine, figure, ticks

from whet.report import formats


def test_a_figure_stands_alone_and_repeats() -> None:
    lines = [
        FigureLine("uniform", [[(0, 0.1), (10, 0.2)], [(0, 0.1), (8, 0.3)]]),
        FigureLine("<speed>", [[(0, 0.1), (5, 0.4)]]),
        FigureLine("empty", []),
    ]
    text = figure(lines, title="accuracy", x_label="tokens", x_show=formats.count)
    assert text == figure(lines, title="accuracy", x_label="tokens", x_show=formats.count)
    tree = ElementTree.fromstring(text)
    words = [element.text for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"uniform", "<speed>", "tokens", "0.40"} <= set(words) and "empty" not in words
    bands = [path for path in tree.iter("{http://www.w3.org/2000/svg}path") if path.get("opacity")]
    assert len(bands) == 1, "one seed has no range"
    assert figure([FigureLine("empty", [])], title="", x_label="", x_show=formats.count) == ""


def test_no_two_lines_of_a_figure_look_alike() -> None:
    lines = [FigureLine(f"arm {i}", [[(0, 0.1), (10, 0.2)]]) for i in range(24)]
    tree = ElementTree.fromstring(figure(lines, title="", x_label="", x_show=formats.count))
    paths = tree.iter("{http://www.w3.org/2000/svg}path")
    strokes = [path.attrib for path in paths if path.get("stroke-width") == "1.8"]
    looks = Counter((stroke["stroke"], stroke.get("stroke-dasharray")) for stroke in strokes)
    assert len(looks) == 24 and set(looks.values()) == {2}, "the line, and its sample in the legend"


@example(-13.6, 2597.7, 3)
@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(3, 9))
def test_ticks_span_the_range_and_are_few(low: float, span: float, most: int) -> None:
    marks = ticks(low, low + span, most)
    slack = 1e-6 * max(abs(low), span)
    assert marks[0] <= low + slack and marks[-1] >= low + span - slack
    assert 1 <= len(marks) <= most
    assert marks == sorted(marks)
