"""How numbers are written, the same in tables, charts and on the terminal."""

from __future__ import annotations

import math

from whet.report.levels import Reach

MISSING = "–"


def count(value: float | None) -> str:
    """
    >>> [count(v) for v in (0, 950, 4360, 43_600, 436_000, 999_600, 1_240_000, 2.5e9)]
    ['0', '950', '4.36k', '43.6k', '436k', '1M', '1.24M', '2.5G']
    """
    if value is None:
        return MISSING
    scaled, units = float(f"{value:.3g}"), ["", "k", "M", "G", "T"]
    while abs(scaled) >= 1000 and len(units) > 1:
        scaled /= 1000
        del units[0]
    return f"{scaled:.3g}{units[0]}"


def duration(seconds: float | None) -> str:
    """
    >>> [duration(v) for v in (0, 0.4, 47.04, 200, 5400, 360_000)]
    ['0s', '0.4s', '47s', '3m20s', '1h30m', '100h']
    """
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(seconds / 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes < 6000 else f"{minutes // 60}h"


def accuracy(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"


def level(value: float) -> str:
    """
    >>> level(0.5), level(0.75), level(0.065)
    ('0.50', '0.75', '0.065')
    """
    return f"{value:.3f}".removesuffix("0")


def share(value: float | None) -> str:
    """
    >>> share(0.417), share(0.004), share(0)
    ('42%', '0.4%', '0%')
    """
    if value is None:
        return MISSING
    return f"{100 * value:.0f}%" if value == 0 or value >= 0.01 else f"{100 * value:.1f}%"


def percent(progress: float) -> str:
    """Rounded down: 100% is said at the end only.

    >>> percent(0.29), percent(0.9999), percent(1.0)
    ('29%', '99%', '100%')
    """
    return f"{math.floor(100 * progress + 1e-9)}%"


def times(ratio: Reach) -> str:
    """A ratio that may be known from one side only: at least, at most, or not at all."""
    if ratio.known:
        return f"{_two_digits(ratio.low)}×"
    if ratio.low > 0:
        return f">{_two_digits(ratio.low)}×"
    return f"<{_two_digits(ratio.high)}×" if math.isfinite(ratio.high) else MISSING


def _two_digits(value: float) -> str:
    return f"{value:.1f}" if 0.95 <= value < 100 else f"{value:.2g}" if value < 0.95 else f"{value:.0f}"
