"""When a GPU stood still, by hand."""

import pytest
import torch
from gaps import Gap, Span, Trace, by_phase, by_size, covered, gaps_between, longest, shifted

SPANS = [Span("a", 100, 200), Span("b", 150, 180), Span("c", 160, 300), Span("d", 450, 500)]


def test_gaps_are_where_no_kernel_runs() -> None:
    assert gaps_between(SPANS, 0, 600) == [Gap(0, 100, "", "a"), Gap(300, 450, "c", "d"), Gap(500, 600, "d", "")]
    assert gaps_between([], 5, 9) == [Gap(5, 9, "", "")]
    assert gaps_between(SPANS, 100, 500) == [Gap(300, 450, "c", "d")], "nothing before the first and after the last"


def test_kernels_that_run_at_once_count_once() -> None:
    assert covered([(0, 4), (2, 5), (7, 8)]) == 6


def test_what_lies_outside_does_not_count() -> None:
    assert gaps_between([Span("early", 0, 50), Span("late", 90, 200)], 20, 80) == [Gap(50, 80, "early", "late")]


def test_gaps_by_size() -> None:
    found = by_size([Gap(0, 20_000, "", ""), Gap(0, 20_001, "", ""), Gap(0, 5_000_000, "", ""), Gap(0, 10**9, "", "")])
    assert {name: row["gaps"] for name, row in found.items()} == {
        "to 20 us": 1,
        "to 100 us": 1,
        "to 1 ms": 0,
        "to 10 ms": 1,
        "longer": 1,
    }
    assert sum(row["seconds"] for row in found.values()) == pytest.approx(1.005040001)


def test_gaps_by_phase_add_up() -> None:
    gaps = gaps_between(SPANS, 0, 600)
    found = by_phase(gaps, [Span("train", 420, 550), Span("generate", 0, 400)])
    assert found["generate"] == pytest.approx(200e-9), "100 at the beginning, 300 to 400"
    assert found["train"] == pytest.approx(80e-9) and found["none"] == pytest.approx(70e-9)
    assert sum(found.values()) == pytest.approx(sum(gap.size for gap in gaps) / 1e9)


def test_one_phase_over_many_gaps_and_one_gap_over_many_phases() -> None:
    many = [Gap(i, i + 1, "", "") for i in range(0, 10, 2)]
    assert by_phase(many, [Span("generate", 0, 100)]) == {"generate": pytest.approx(5e-9), "none": 0.0}
    found = by_phase([Gap(0, 10, "", "")], [Span("a", 0, 3), Span("b", 3, 6), Span("a", 8, 12)])
    assert found == {"a": pytest.approx(5e-9), "b": pytest.approx(3e-9), "none": pytest.approx(2e-9)}


def test_the_longest() -> None:
    first, second = longest(gaps_between(SPANS, 0, 600), [Span("judge", 350, 400)], 0, count=2)
    assert (first["before"], first["after"], first["phase"]) == ("c", "d", "judge")
    assert first["ms"] == pytest.approx(150e-6) and first["at_ms"] == pytest.approx(300e-6)
    assert second["phase"] == "none"


def test_another_clock() -> None:
    assert shifted([Span("a", 5, 7)], -3) == [Span("a", 2, 4)]


def test_a_cpu_has_a_wall_only() -> None:
    trace = Trace(torch.device("cpu"))
    trace.start()
    trace.stop()
    assert trace.end >= trace.begin > 0 and not trace.spans


@pytest.mark.gpu
def test_kernels_are_found_on_the_walls_clock() -> None:
    device = torch.device("cuda")
    work = torch.zeros(2**24, device=device)
    trace = Trace(device)
    trace.start()
    for _ in range(3):
        work.add_(1)
    trace.stop()
    assert len(trace.spans) == 3
    assert trace.begin - 1e6 < trace.spans[0].start and trace.spans[-1].stop < trace.end + 1e6
