from curves import at, median_curve


def test_at_is_linear_between_points_and_flat_outside() -> None:
    curve = [(1.0, 2.0), (3.0, 6.0), (3.0, 8.0), (4.0, 8.0)]
    assert [at(curve, x) for x in (0, 1, 2, 3, 3.5, 9)] == [2, 2, 4, 6, 8, 8]


def test_median_curve_covers_only_what_all_curves_cover() -> None:
    short, long = [(0.0, 0.0), (2.0, 1.0)], [(1.0, 0.0), (4.0, 3.0)]
    assert median_curve([short, long], points=2) == [(1.0, 0.25), (2.0, 1.0)]
    assert median_curve([short, []]) == short
    assert median_curve([]) == []
    assert median_curve([[(0.0, 0.0), (1.0, 1.0)], [(2.0, 0.0), (3.0, 1.0)]]) == []
