"""The pictures of the pages, as SVG: what a method does, and what was measured (from benchmarks/results).

    python docs/figures/make.py        # writes docs/figures/*.svg; needs no package

Each picture makes one point. The colours are Okabe and Ito's, which the colour-blind can tell apart. The ground is
white also on a dark page. The same results give the same bytes.
"""

import itertools
import json
import math
import re
from html import escape
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
INK, GREY, PALE = "#222222", "#767676", "#e8e8e8"
BLUE, ORANGE, GREEN, RED, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9"


class Picture:
    """A sheet of shapes; y goes down. `title` is what a screen reader says."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="14" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        ]

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", size: int = 14, **more: str
    ) -> None:
        style = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{style}>{escape(words)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str = PALE,
        stroke: str = "none",
        rx: float = 3,
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{rx:g}" fill="{fill}" stroke="{stroke}"/>'
        )

    def dot(self, x: float, y: float, right: bool, r: float = 7) -> None:
        """A response: right ones are full and ticked by their colour, wrong ones are hollow."""
        fill = GREEN if right else "#ffffff"
        self.parts.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="{r}" fill="{fill}" stroke="{GREEN if right else RED}" stroke-width="2"/>'
        )

    def line(
        self,
        points: list[tuple[float, float]],
        stroke: str = INK,
        width: float = 2,
        dash: str = "",
        arrow: bool = False,
    ) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width}"{dashes}/>'
        )
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            turn = math.degrees(math.atan2(y - y0, x - x0))
            self.parts.append(
                f'<path d="M0 0-9-5-9 5z" fill="{stroke}" transform="translate({x:.1f} {y:.1f}) rotate({turn:.0f})"/>'
            )

    def save(self, name: str) -> None:
        (HERE / f"{name}.svg").write_text("\n".join([*self.parts, "</svg>", ""]), encoding="utf-8")


# ---- what the methods do


def loop() -> None:
    p = Picture(
        760,
        196,
        "The loop: the curriculum chooses prompts, the engine writes, the judge scores, the learner trains",
    )
    steps = [
        ("curriculum", "which prompts,", "how many tries", BLUE),
        ("engine", "writes the", "responses", GREEN),
        ("judge", "right or", "wrong", ORANGE),
        ("learner", "changes the", "weights", RED),
    ]
    for i, (name, first, second, colour) in enumerate(steps):
        x = 24 + 184 * i
        p.box(x, 46, 150, 84, "#ffffff", colour, 8)
        p.box(x, 46, 150, 26, colour, rx=8)
        p.text(x + 75, 64, name, "middle", 15, fill="#ffffff", font_weight="600")
        p.text(x + 75, 94, first, "middle")
        p.text(x + 75, 114, second, "middle")
        if i < 3:
            p.line([(x + 152, 88), (x + 182, 88)], GREY, 2, arrow=True)
    p.line([(405 + 62, 134), (405 + 62, 160), (99, 160), (99, 136)], BLUE, 2, arrow=True)
    p.text(
        283,
        178,
        "every verdict teaches the curriculum, also those of groups that do not train",
        "middle",
        13,
        fill=BLUE,
    )
    p.text(20, 28, "One update", size=17, font_weight="600")
    p.save("loop")


def speed() -> None:
    p = Picture(
        760,
        300,
        "SPEED: four tries screen a prompt; only prompts with right and wrong tries get the other twelve",
    )
    p.text(
        20, 28, "Four tries tell whether the other twelve are worth it", size=17, font_weight="600"
    )
    p.text(128, 58, "screening", size=13, fill=GREY)
    p.text(430, 58, "continuation", size=13, fill=GREY)
    rows = [
        ("too easy", (1, 1, 1, 1)),
        ("too hard", (0, 0, 0, 0)),
        ("teaches", (1, 0, 0, 1)),
        ("too hard", (0, 0, 0, 0)),
        ("teaches", (0, 1, 0, 0)),
    ]
    tail = {2: (0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 0), 4: (0, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0)}
    for i, (word, tries) in enumerate(rows):
        y = 84 + 38 * i
        p.text(20, y + 5, f"prompt {i + 1}")
        for k, right in enumerate(tries):
            p.dot(138 + 22 * k, y, bool(right))
        if i in tail:
            p.line([(230, y), (330, y)], BLUE, 2, arrow=True)
            for k, right in enumerate(tail[i]):
                p.dot(352 + 22 * k, y, bool(right))
            p.text(628, y + 5, "trains", fill=BLUE, font_weight="600")
        else:
            p.text(236, y + 5, f"{word}: dropped, 12 tries saved", fill=GREY)
    p.dot(138, 278, True)
    p.text(152, 283, "right", size=13)
    p.dot(222, 278, False)
    p.text(236, 283, "wrong", size=13)
    p.save("speed")


def cures() -> None:
    p = Picture(
        760,
        290,
        "CurES: prompts that are solved half of the time get the most rollouts: 10, 8, 8 and 6 of 32",
    )
    p.text(20, 28, "Tries go where the outcome is open", size=17, font_weight="600")
    left, bottom, wide, high = 60, 236, 380, 170
    curve = [
        (left + wide * k / 80, bottom - high * 2 * math.sqrt(k / 80 * (1 - k / 80)))
        for k in range(81)
    ]
    p.line(curve, BLUE, 3)
    p.line([(left, bottom), (left + wide, bottom)], GREY, 1)
    for rate in (0, 0.5, 1):
        p.text(left + wide * rate, bottom + 18, f"{rate:.0%}", "middle", 12, fill=GREY)
    p.text(left + wide / 2, bottom + 38, "how often the model solves the prompt", "middle", 13)
    p.text(left - 4, 56, "spread of the verdicts, √(p(1−p))", size=13, fill=BLUE)
    p.text(500, 56, "32 tries for four prompts", size=13)
    for i, (rate, n) in enumerate(((0.5, 10), (0.25, 8), (0.75, 8), (0.1, 6))):
        y = 74 + 42 * i
        x, top = left + wide * rate, bottom - high * 2 * math.sqrt(rate * (1 - rate))
        p.parts.append(f'<circle cx="{x:g}" cy="{top:g}" r="6" fill="{ORANGE}" stroke="{INK}"/>')
        p.text(500, y + 16, f"{rate:.0%}")
        for k in range(n):
            p.box(548 + 17 * k, y + 4, 13, 15, ORANGE)
        p.text(548 + 17 * n + 6, y + 17, str(n), font_weight="600")
    p.save("cures")


def scalingrl() -> None:
    p = Picture(
        760,
        280,
        "ScalingRL: the training set is a small window that moves from average to harder prompts and narrows",
    )
    p.text(20, 28, "A small set that moves towards harder prompts", size=17, font_weight="600")
    for i, (label, centre, width) in enumerate(
        (("early", 0.45, 0.22), ("middle", 0.53, 0.1), ("late", 0.62, 0.05))
    ):
        left, bottom = 30 + 244 * i, 200
        heap = [
            ((k + 0.5) / 24, 120 * math.exp(-(((k + 0.5) / 24 - 0.45) ** 2) / 0.08))
            for k in range(24)
        ]
        bell = [math.exp(-((x - centre) ** 2) / (2 * width**2)) for x, _ in heap]
        scale = (
            0.18
            * sum(n for _, n in heap)
            / sum(b * n for b, (_, n) in zip(bell, heap, strict=True))
        )
        for k, (_, count) in enumerate(heap):
            taken = count * min(1.0, scale * bell[k])
            p.box(left + 9 * k, bottom - count, 7, count, PALE, rx=0)
            p.box(left + 9 * k, bottom - taken, 7, taken, BLUE, rx=0)
        p.line([(left, bottom), (left + 216, bottom)], GREY, 1)
        p.text(left + 108, 62, label, "middle", 15, font_weight="600")
        p.text(left, bottom + 18, "easy", size=12, fill=GREY)
        p.text(left + 216, bottom + 18, "hard", "end", 12, fill=GREY)
    p.box(30, 244, 14, 14, PALE)
    p.text(50, 256, "all prompts", size=13)
    p.box(150, 244, 14, 14, BLUE)
    p.text(170, 256, "the set of this epoch, 18% of them (a drawing, not data)", size=13)
    p.save("scalingrl")


def fastcurl() -> None:
    p = Picture(
        760,
        290,
        "FastCuRL: short problems under a short limit, all under a longer one, long ones under the longest",
    )
    p.text(20, 28, "Short problems and short answers first", size=17, font_weight="600")
    stages = [
        ("1", "short problems", 8),
        ("2", "all problems", 16),
        ("3", "long problems", 24),
        ("4", "all problems", 16),
    ]
    bottom = 232
    for i, (number, subset, limit) in enumerate(stages):
        x, high = 96 + 160 * i, limit * 6.6
        p.box(x, bottom - high, 146, high, (SKY, BLUE, "#004f7c", BLUE)[i])
        p.text(
            x + 73,
            bottom - high + 24,
            f"{limit}K tokens",
            "middle",
            15,
            fill="#ffffff" if i else INK,
            font_weight="600",
        )
        p.text(x + 73, bottom + 20, f"stage {number}", "middle", font_weight="600")
        p.text(x + 73, bottom + 40, subset, "middle", 13)
    p.line([(84, bottom), (84, 60)], GREY, 1.5, arrow=True)
    p.text(20, 76, "limit of a", size=13, fill=GREY)
    p.text(20, 92, "response", size=13, fill=GREY)
    p.save("fastcurl")


def lossless() -> None:
    p = Picture(
        760,
        290,
        "The model draws its own token at each place; guesses are kept while they agree, then the model's token stands",
    )
    p.text(20, 28, "A guess is kept only where the model says the same", size=17, font_weight="600")
    guess = ["12", "+", "5", "=", "18"]
    drawn = ["12", "+", "5", "=", "17", "."]
    for row, (words, y) in enumerate(((guess, 66), (drawn, 132))):
        p.text(20, y + 24, ("guessed", "drawn by the model")[row], size=14)
        for k, word in enumerate(words):
            x = 180 + 88 * k
            used = k <= 4
            colour = (
                (PALE if k < 4 else "#f7d7c4")
                if row == 0
                else (GREEN if k < 4 else BLUE if used else "#ffffff")
            )
            p.box(x, y, 74, 38, colour, GREY if not used else "none", 6)
            p.text(
                x + 37,
                y + 25,
                word if used else "…",
                "middle",
                17,
                fill="#ffffff" if row and used else INK,
                font_weight="600",
            )
    for k in range(4):
        p.text(217 + 88 * k, 122, "=", "middle", 15, fill=GREEN, font_weight="700")
    p.text(217 + 88 * 4, 122, "≠", "middle", 16, fill=RED, font_weight="700")
    p.text(657, 193, "not looked at", "middle", 12, fill=GREY)
    p.text(20, 226, "written", size=14)
    for k, word in enumerate(drawn[:5]):
        p.box(180 + 88 * k, 204, 74, 38, GREEN if k < 4 else BLUE, rx=6)
        p.text(217 + 88 * k, 229, word, "middle", 17, fill="#ffffff", font_weight="600")
    p.text(
        180,
        270,
        "five tokens from one pass, and every one of them was drawn by the model itself",
        size=14,
    )
    p.save("lossless")


def stream() -> None:
    p = Picture(
        760,
        300,
        "Barrier waits for the longest response; stream gives a free slot the next prompt at once",
    )
    p.text(20, 28, "A free slot starts the next prompt at once", size=17, font_weight="600")
    lengths = [(150, 60), (60, 110), (235, 40), (90, 90)]
    for panel, (left, name) in enumerate(((20, "barrier"), (400, "stream"))):
        p.text(left, 62, name, size=15, font_weight="600")
        for row, parts in enumerate(lengths):
            y, x = 78 + 34 * row, float(left)
            fill = [*parts, 70, 55, 60] if panel else [parts[0]]
            for k, length in enumerate(fill):
                wide = min(length, left + 320 - x) if panel else length
                if wide > 6:
                    p.box(x, y, wide, 24, (BLUE, SKY, GREEN, ORANGE, BLUE)[k])
                    x += wide + 3
            if not panel and x - left < 235:
                p.box(x, y, left + 238 - x, 24, "#ffffff", "#bbbbbb")
        for end in (left + 110, left + 215) if panel else (left + 242,):
            p.line([(end, 68), (end, 218)], RED, 2, "4 3")
            p.text(end, 236, "update", "middle", 13, fill=RED)
    p.box(20, 262, 16, 14, "#ffffff", "#bbbbbb")
    p.text(44, 274, "waits", size=13)
    p.text(
        120,
        274,
        "each row is a slot of the engine, each box a response (a drawing, not data)",
        size=13,
        fill=GREY,
    )
    p.save("stream")


# ---- what was measured


def accuracy_curves(arm: str, seeds: range) -> list[list[tuple[float, float]]]:
    """(tokens, accuracy) of every evaluation of an arm on mazes, one list for each seed."""
    curves = []
    for seed in seeds:
        cell = json.loads(
            (RESULTS / "train" / "maze_matrix" / f"{arm}-seed{seed}.json").read_text()
        )
        tokens, accuracy = cell["columns"].index("tokens"), cell["columns"].index("accuracy")
        rows = [row for row in cell["rows"] if row[accuracy] is not None]
        curves.append([(row[tokens], row[accuracy]) for row in rows])
    return curves


def height(curve: list[tuple[float, float]], x: float) -> float:
    """The curve at x, linear between its points; a run that ended early keeps its last accuracy."""
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return curve[-1][1] if x > curve[-1][0] else curve[0][1]


def accuracy() -> None:
    """The first picture of the README: accuracy against generated tokens, plain sampling and whet."""
    budget, top = 12e6, 0.7
    left, bottom, wide, high = 70, 300, 540, 240
    title = "Accuracy against generated tokens on mazes: whet and plain sampling"
    p = Picture(760, 360, title)
    p.text(20, 28, "Mazes: accuracy against generated tokens", size=17, font_weight="600")
    for tick in (0, 0.2, 0.4, 0.6):
        y = bottom - high * tick / top
        p.line([(left, y), (left + wide, y)], PALE, 1)
        p.text(left - 8, y + 5, f"{tick:.0%}", "end", 12, fill=GREY)
    for tick in (0, 3, 6, 9, 12):
        p.text(left + wide * tick * 1e6 / budget, bottom + 20, f"{tick}M", "middle", 12, fill=GREY)
    xs = [budget * k / 80 for k in range(81)]
    for arm, label, colour in (("uniform", "plain sampling", GREY), ("five", "whet", BLUE)):
        curves = accuracy_curves(arm, range(1, 5))
        at = {x: sorted(height(curve, x) for curve in curves) for x in xs}
        points = {x: (left + wide * x / budget, values) for x, values in at.items()}
        upper = [(x, bottom - high * values[-1] / top) for x, values in points.values()]
        lower = [(x, bottom - high * values[0] / top) for x, values in points.values()]
        outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *reversed(lower)])
        p.parts.append(f'<polygon points="{outline}" fill="{colour}" opacity="0.15"/>')
        middle = [(x, bottom - high * median(values) / top) for x, values in points.values()]
        p.line(middle, colour, 3)
        p.text(middle[-1][0] + 8, middle[-1][1] + 5, label, fill=colour, font_weight="600")
    p.text(
        left + wide / 2,
        bottom + 42,
        "tokens generated for training; median and range of four seeds",
        "middle",
        13,
    )
    p.save("accuracy")


def dose(arm: str) -> dict[str, tuple[float, float, float]]:
    """Tokens to the target as a share of uniform's, with its range, by the share of informative prompts."""
    found = {}
    for line in (RESULTS / "dose" / "dose.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| \n").split("|")]
        if (
            len(cells) == 8
            and cells[1] == arm
            and (m := re.match(r"([\d.]+) \(([\d.]+)–([\d.]+)\)", cells[6]))
        ):
            saving, low, high = map(float, m.groups())
            found[cells[0]] = (1 / saving, 1 / high, 1 / low)
    return found


def dose_picture(name: str, arm: str, title: str) -> None:
    rows = dose(arm)
    p = Picture(
        720,
        330,
        f"{title}: " + ", ".join(f"{share}: {value[0]:.2f}" for share, value in rows.items()),
    )
    p.text(20, 30, title, size=17, font_weight="600")
    left, bottom, high = 70, 262, 190
    top = 1.3 if max(value for value, *_ in rows.values()) > 1 else 1.02
    for tick in (0, 0.5, 1):
        y = bottom - high * tick / top
        p.line(
            [(left, y), (700, y)],
            GREY if tick == 1 else PALE,
            1.5 if tick == 1 else 1,
            "4 3" if tick == 1 else "",
        )
        p.text(left - 8, y + 5, f"{tick:g}", "end", 12, fill=GREY)
    for i, (share, (value, low, up)) in enumerate(rows.items()):
        x = left + 36 + 122 * i
        p.box(x, bottom - high * value / top, 60, high * value / top, BLUE if up < 1 else "#9fb6c8")
        p.line(
            [(x + 30, bottom - high * low / top), (x + 30, bottom - high * min(up, top) / top)],
            INK,
            1.5,
        )
        p.text(x + 66, bottom - high * value / top + 5, f"{value:.2f}", font_weight="600")
        p.text(x + 30, bottom + 20, share, "middle")
    p.text(385, bottom + 42, "share of the prompts that teach at the start", "middle", 13)
    p.text(
        385,
        bottom + 60,
        "tokens to the same accuracy, relative to uniform sampling (dashed); 95% ranges, three seeds",
        "middle",
        12,
        fill=GREY,
    )
    p.save(name)


def speculation() -> None:
    rungs = json.loads((RESULTS / "draft.json").read_text())["rungs"]
    speed_up = rungs["controller"]["speed_up"]["median"]
    p = Picture(
        760,
        330,
        f"Requests still running: with speculation the long tail ends {speed_up:.2f} times as soon",
    )
    p.text(20, 30, f"The long tail ends {speed_up:.2f} times as soon", size=17, font_weight="600")
    left, bottom, wide, high = 60, 262, 640, 200
    for rung, colour, label, (dx, dy) in (
        ("off", GREY, "plain", (330, -44)),
        ("controller", BLUE, "with drafts", (34, -30)),
    ):
        curve = [(t, n) for t, n in rungs[rung]["running"] if n]
        end = rungs[rung]["makespan"]["median"]
        curve = [(0, curve[0][1]), *curve, (end, 0)]
        p.line([(left + wide * t, bottom - high * n / 128) for t, n in curve], colour, 3)
        p.text(
            left + wide * end,
            bottom - 10,
            f"{end:.2f} s",
            "end",
            14,
            fill=colour,
            font_weight="600",
        )
        p.text(left + dx, bottom + dy, label, fill=colour, font_weight="600")
    p.line([(left, bottom), (left + wide, bottom)], GREY, 1)
    for n in (0, 64, 128):
        p.text(left - 8, bottom - high * n / 128 + 5, str(n), "end", 12, fill=GREY)
    p.text(left, 52, "requests still running", size=13, fill=GREY)
    p.text(
        left + wide / 2,
        bottom + 26,
        "seconds; 128 requests of a 17M model on one H200, of at most 2,048 tokens",
        "middle",
        13,
    )
    p.text(
        left + wide / 2,
        bottom + 46,
        "the same requests, the same rule of drawing",
        "middle",
        12,
        fill=GREY,
    )
    p.save("speculation")


def main() -> None:
    for draw in (loop, speed, cures, scalingrl, fastcurl, lossless, stream, speculation, accuracy):
        draw()
    dose_picture("savings", "all", "All four curricula save most where few prompts teach")
    dose_picture("speed-measured", "speed", "SPEED saves most where few prompts teach")
    dose_picture("cures-measured", "cures", "CurES alone saved no tokens on this ground")


if __name__ == "__main__":
    main()
