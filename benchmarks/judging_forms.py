r"""Families for judging_pairs.py whose answers are no plain numbers: intervals, lists, formulas, times, choices, words.

Each draws values and yields the reference, whether the answers are right, and the answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

Made = Iterator[tuple[str, bool, list[str]]]
"""The reference, whether the answers are right, the answers."""


def intervals(rng: random.Random) -> Made:
    a, w = rng.randint(-20, 20), rng.randint(1, 20)
    b = a + w
    left, right = rng.choice("(["), rng.choice(")]")
    gold = f"{left}{a},{b}{right}"
    low, high = "<" if left == "(" else "\\leq", "<" if right == ")" else "\\leq"
    same = [f"{left}{a}, {b}{right}", f"\\left{left}{a}, {b}\\right{right}", f"x \\in {left}{a}, {b}{right}"]
    same += [f"{left}{2 * a}/2, {b}.0{right}", f"{a} {low} x {high} {b}", f"{left} {a} , {b} {right}"]
    same += [f"\\big{left}{a},{b}\\big{right}", f"{gold}.", gold.replace("-", "\u2212")]
    yield gold, True, same
    flipped_left, flipped_right = "[" if left == "(" else "(", "]" if right == ")" else ")"
    wrong = [
        f"{flipped_left}{a},{b}{right}",
        f"{left}{a},{b}{flipped_right}",
        f"{left}{b},{a}{right}",
        f"{a}",
        f"{b - a}",
    ]
    wrong += [
        f"{left}{a},{b + 1}{right}",
        f"{left}{a - 1},{b}{right}",
        f"{gold} \\cup {{{b + 3}}}",
        f"x > {a}",
        f"{a}, {b}, {b + 1}",
    ]
    wrong += [
        f"{left}{a},\\infty)",
        f"(-\\infty,{a}) \\cup ({b},\\infty)",
        f"{b} {high} x {low} {a}",
        f"{left}{a}{right}",
    ]
    yield gold, False, wrong
    ray = f"({a}, \\infty)"
    yield (
        ray,
        True,
        [f"({a}, +\\infty)", f"({a}, \u221e)", f"x > {a}", f"{a} < x", f"x \\gt {a}", f"\\left({a},\\infty\\right)"],
    )
    yield (
        ray,
        False,
        [f"[{a}, \\infty)", f"(-\\infty, {a})", f"x < {a}", f"x \\ge {a}", f"({a + 1}, \\infty)", f"{a}", "\\infty"],
    )


def tuples(rng: random.Random) -> Made:
    parts = rng.sample(range(-30, 31), rng.choice([2, 2, 3]))
    text = ", ".join(map(str, parts))
    names, thin = ["x", "y", "z"][: len(parts)], text.replace(", ", ",\\,")
    right = [f"({text})", f"({text.replace(' ', '')})", f"\\left({text}\\right)", f"({', '.join(names)}) = ({text})"]
    right += [
        ", ".join(f"{v} = {p}" for v, p in zip(names, parts, strict=True)),
        f"({', '.join(f'{p}.0' for p in parts)})",
    ]
    right += [f"({text})".replace("-", "\u2212"), f"({thin})", f"( {text} )", f"\\bigl({text}\\bigr)"]
    yield f"({text.replace(' ', '')})", True, right
    turned = ", ".join(map(str, parts[1:] + parts[:1]))
    wrong = [
        f"({turned})",
        f"({text}, 1)",
        f"({', '.join(map(str, parts[:-1]))})",
        f"({parts[0] + 1}, {text.split(', ', 1)[1]})",
    ]
    wrong += [
        f"[{text}]",
        f"({text}), ({turned})",
        f"({text}) \\text{{ or }} ({turned})",
        f"-({text})",
        f"{parts[0]}",
        f"2({text})",
    ]
    wrong += [f"({', '.join(str(-p) for p in parts)})", f"({text}"]
    yield f"({text.replace(' ', '')})", False, wrong if 0 not in parts else wrong[:8]


def lists(rng: random.Random) -> Made:
    parts = rng.sample([p for p in range(-40, 99) if p > 40 or p % 2 == (p < 0)], rng.choice([2, 3, 3, 4]))
    some = [str(p) for p in parts]
    mixed = rng.sample(some, len(some))
    right = [", ".join(mixed), "; ".join(mixed), ",".join(some), f"\\{{{', '.join(mixed)}\\}}", " and ".join(mixed)]
    right += [
        f"{', '.join(mixed[:-1])} and {mixed[-1]}",
        f"{', '.join(mixed[:-1])}, and {mixed[-1]}",
        " \\text{ or } ".join(mixed),
    ]
    right += [
        " or ".join(f"x = {p}" for p in mixed),
        f"\\left\\{{{', '.join(mixed)}\\right\\}}",
        f"x = {', '.join(mixed)}",
    ]
    right += [
        f"x \\in \\{{{', '.join(mixed)}\\}}",
        "x_1 = " + ", x_2 = ".join(mixed[:2]) if len(mixed) == 2 else ", ".join(some),
    ]
    wrong = [
        ", ".join(mixed[1:]),
        ", ".join([*mixed, "177"]),
        mixed[0],
        str(sum(parts)),
        " + ".join(mixed),
        f"-({mixed[0]})",
    ]
    wrong += [", ".join([str(int(mixed[0]) + 1), *mixed[1:]]), ", ".join(str(-p) for p in parts), " = ".join(mixed)]
    wrong += [
        f"{', '.join(mixed)}, \\ldots",
        f"not {', '.join(mixed)}",
        f"\\{{{', '.join(mixed)}\\}} \\setminus \\{{{mixed[0]}\\}}",
    ]
    for gold in (", ".join(some), f"\\{{{','.join(some)}\\}}"):
        yield gold, True, right
        yield gold, False, wrong
    n = rng.randint(2, 60)
    yield (
        f"{n}, -{n}",
        True,
        [f"\\pm {n}", f"\\pm{n}", f"\u00b1{n}", f"x = \\pm {n}", f"-{n} \\text{{ and }} {n}", f"{n} or -{n}"],
    )
    yield f"\\pm {n}", True, [f"{n}, -{n}", f"\u00b1 {n}", f"-{n} \\text{{ or }} {n}"]
    yield f"\\pm {n}", False, [f"{n}", f"-{n}", f"{n}, {n}", f"\\pm {n + 1}", f"\\pm \\sqrt{{{n}}}", "0"]


def polynomials(rng: random.Random) -> Made:
    r, s, k = rng.randint(1, 9), rng.randint(10, 19), rng.randint(2, 9)
    gold = f"x^2+{r + s}x+{r * s}"
    right = [
        f"{r * s} + {r + s}x + x^2",
        f"(x+{r})(x+{s})",
        f"(x + {s})(x + {r})",
        f"x^{{2}} + {r + s} x + {r * s}",
        f"f(x) = {gold}",
    ]
    right += [
        f"x\u00b2+{r + s}x+{r * s}",
        f"x^2 + {r + s}\\cdot x + {r * s}",
        f"x(x+{r + s})+{r * s}",
        f"y = {gold}",
        f"x**2 + {r + s}*x + {r * s}",
    ]
    wrong = [
        f"x^2-{r + s}x+{r * s}",
        f"(x-{r})(x-{s})",
        f"x^2+{r + s}x",
        f"x^2+{r * s}x+{r + s}",
        f"2x+{r + s}",
        f"x^3+{r + s}x+{r * s}",
    ]
    wrong += [
        f"{gold}+1",
        f"-({gold})",
        f"{k}({gold})",
        f"t^2+{r + s}t+{r * s}",
        f"{gold} = 0 \\text{{ or }} x",
        f"({gold})^2",
        f"x+{r}",
    ]
    yield gold, True, right
    yield gold, False, wrong
    line = f"y = {k}x + {s}"
    yield (
        line,
        True,
        [f"y={k}x+{s}", f"{k}x + {s}", f"y = {s} + {k}x", f"{k}x - y + {s} = 0", f"y - {s} = {k}x", f"{k}x+{s}=y"],
    )
    yield (
        line,
        False,
        [f"y = -{k}x + {s}", f"y = {s}x + {k}", f"y = {k}x - {s}", f"x = {k}y + {s}", f"y > {k}x + {s}", f"{s}"],
    )
    a, b = r, s
    yield (
        f"{a}+{b}i",
        True,
        [f"{a} + {b}i", f"{b}i + {a}", f"z = {a}+{b}i", f"{a}+{b}\\,i", f"{a}+i{b}", f"{a} + {b} \\cdot i"],
    )
    yield (
        f"{a}+{b}i",
        False,
        [f"{a}-{b}i", f"{b}+{a}i", f"{a + b}", f"{a}+{b}", f"{a + b}i", f"-{a}+{b}i", f"({a}, {b})"],
    )


def surds(rng: random.Random) -> Made:
    a, b, k = rng.randint(2, 9), rng.choice([2, 3, 5, 6, 7, 10, 11]), rng.randint(3, 9)
    right = [
        f"{a}\\sqrt{{{b}}}",
        f"{a} \\cdot \\sqrt{{{b}}}",
        f"\\sqrt{{{a * a * b}}}",
        f"\\sqrt{{{b}}} \\cdot {a}",
        f"{a}\u221a{b}",
    ]
    right += [
        f"{a}\\sqrt{b}" if b < 10 else f"{a} \\sqrt{{{b}}}",
        f"{a}*sqrt({b})",
        f"{a} \\times \\sqrt{{{b}}}",
        f"{a}({b})^{{1/2}}",
    ]
    right += [f"\\frac{{{a * b}}}{{\\sqrt{{{b}}}}}", f"x = {a}\\sqrt{{{b}}}", f"{a}\\cdot {b}^{{\\frac{{1}}{{2}}}}"]
    wrong = [
        f"\\sqrt{{{a * b}}}",
        f"{a} + \\sqrt{{{b}}}",
        f"{b}\\sqrt{{{a}}}",
        f"{a}\\sqrt[3]{{{b}}}",
        f"-{a}\\sqrt{{{b}}}",
        f"{a}{b}",
    ]
    wrong += [
        f"{a * b**0.5:.2f}",
        f"{a + 1}\\sqrt{{{b}}}",
        f"\\frac{{{a}}}{{\\sqrt{{{b}}}}}",
        f"\\pm {a}\\sqrt{{{b}}}",
        f"{a * b}",
        f"{a}",
    ]
    yield f"{a}\\sqrt{{{b}}}", True, right
    yield f"{a}\\sqrt{{{b}}}", False, wrong if a != b else wrong[3:]
    yield (
        f"{a}\\pi",
        True,
        [
            f"{a}\\pi",
            f"{a} \\pi",
            f"\\pi \\cdot {a}",
            f"{a}\u03c0",
            f"{a} \\times \\pi",
            f"{a}*pi",
            f"{a} pi",
            f"\\pi({a})",
        ],
    )
    yield (
        f"{a}\\pi",
        False,
        [
            f"{a}",
            f"{a}\\pi^2",
            f"{a * 3.14:.2f}",
            "\\pi",
            f"\\frac{{{a}}}{{\\pi}}",
            f"{a + 1}\\pi",
            f"{a}\\pi r",
            f"\\pi^{a}",
        ],
    )
    yield (
        f"\\frac{{{a}}}{{{k + 9}}}\\pi",
        True,
        [f"\\frac{{{a}\\pi}}{{{k + 9}}}", f"{a}\\pi/{k + 9}", f"\\frac{{{a}}}{{{k + 9}}} \\cdot \\pi"],
    )
    yield f"{k}^{{{a}}}", True, [f"{k**a}", f"{k}^{a}", f"{k}^{{{a}}}", f"{k**a:,}", f"{k} \\cdot {k}^{{{a - 1}}}"]
    yield f"{k}^{{{a}}}", False, [f"{k * a}", f"{k}{a}", f"{k}^{{{a + 1}}}", f"{k**a + 1}", f"-{k}^{{{a}}}", f"{k}"]
    yield (
        f"x > {a}",
        True,
        [f"{a} < x", f"x \\gt {a}", f"x>{a}", f"({a}, \\infty)", f"x \\in ({a}, \\infty)", f"x > {a}.0"],
    )
    yield (
        f"x > {a}",
        False,
        [f"x < {a}", f"x \\geq {a}", f"x = {a}", f"{a}", f"x > {a + 1}", f"{a} > x", f"x \\neq {a}"],
    )


def matrices(rng: random.Random) -> Made:
    a, b, c, d = rng.sample(range(-9, 30), 4)
    rows = f"{a} & {b} \\\\ {c} & {d}"
    gold = f"\\begin{{pmatrix}} {rows} \\end{{pmatrix}}"
    right = [
        gold,
        gold.replace("pmatrix", "bmatrix"),
        gold.replace(" ", ""),
        f"\\begin{{pmatrix}}{a}.0&{b}\\\\{c}&{d}\\end{{pmatrix}}",
    ]
    wrong = [
        f"\\begin{{pmatrix}} {p} & {q} \\\\ {r} & {s} \\end{{pmatrix}}"
        for p, q, r, s in ((a, c, b, d), (a, b, c, d + 1), (c, d, a, b))
    ]
    yield gold, True, [*right, f"A = {gold}"]
    yield gold, False, [*wrong, f"({a}, {b}, {c}, {d})", f"{a * d - b * c}", f"-{gold}", f"2{gold}"]


def clocks(rng: random.Random) -> Made:
    h, m = rng.randint(1, 11), rng.randint(10, 59)
    half = rng.choice(["AM", "PM"])
    dots, other = f"{half[0].lower()}.m.", "PM" if half == "AM" else "AM"
    yield f"{h}:{m}", True, [f"{h}:{m}", f"\\text{{{h}:{m}}}", f"{h}{{:}}{m}", f"0{h}:{m}", f"{h} : {m}"]
    yield (
        f"{h}:{m}",
        False,
        [f"{h + 1}:{m}", f"{m}:{h}", f"{h}.{m}", f"{h}{m}", f"{h}:{(m + 7) % 50 + 10}", f"{h}", f"{h}:{m}:30"],
    )
    yield (
        f"{h}:{m} {half}",
        True,
        [f"{h}:{m} {dots}", f"{h}:{m} {half.lower()}", f"{h}:{m}{half}", f"{h}:{m}\\text{{ {dots}}}"],
    )
    yield (
        f"{h}:{m} {half}",
        False,
        [f"{h}:{m} {other}", f"{h + 1}:{m} {half}", f"{h}:{m} {other.lower()}", f"{h} {half}"],
    )
    a, b = rng.sample([2, 3, 5, 7, 11, 13, 17], 2)
    yield (
        f"{a}:{b}",
        True,
        [f"{a}:{b}", f"{a} : {b}", f"{a} \\text{{ to }} {b}", f"{a} to {b}", f"{a}{{:}}{b}", f"{a}\\colon {b}"],
    )
    yield (
        f"{a}:{b}",
        False,
        [f"{b}:{a}", f"{a}:{b + 1}", f"{a}, {b}", f"{a}{b}", f"{a}", f"{a}:{b}:1", f"1:{a}", f"{a}.{b}"],
    )


def choices(rng: random.Random) -> Made:
    letter, other = rng.sample("ABCDE", 2)
    n = rng.randint(10, 99)
    low = letter.lower()
    right = [
        letter,
        low,
        f"({letter})",
        f"({low})",
        f"{letter}.",
        f"{letter})",
        f"\\text{{{letter}}}",
        f"\\textbf{{({letter})}}",
    ]
    right += [
        f"({letter}) {n}",
        f"{letter}. {n}",
        f"{letter}: {n}",
        f"{letter}) {n}",
        f"\\text{{({letter})}} {n}",
        f"\\mathrm{{{letter}}}",
    ]
    right += [
        f"Option {letter}",
        f"\\text{{Choice }} {letter}",
        f"**{letter}**",
        f"\\textbf{{({letter})}}\\ {n}",
        f"option ({low})",
    ]
    wrong = [
        other,
        other.lower(),
        f"({other})",
        f"{letter} or {other}",
        f"{letter}, {other}",
        f"({letter}) and ({other})",
        f"{other}) {n}",
    ]
    wrong += [
        f"{letter}) {n} or {other}) {n + 1}",
        f"not {letter}",
        f"{letter}{other}",
        f"neither {letter} nor {other}",
        f"{letter}/{other}",
    ]
    wrong += [
        "all of the above",
        f"either {letter} or {other}",
        f"({letter}) {n}, ({other}) {n + 1}",
        f"not ({low})",
        "none",
        f"{letter} + 1",
    ]
    for gold in (letter, f"({letter})", f"\\text{{({letter})}}"):
        yield gold, True, right
        yield gold, False, wrong


WORDS = ["Tuesday", "Friday", "even", "odd", "red", "blue", "Paris", "Evelyn", "yes", "no", "north", "July", "ellipse"]


def words(rng: random.Random) -> Made:
    word, other = rng.sample(WORDS, 2)
    right = [
        word,
        word.lower(),
        word.upper(),
        f"\\text{{{word}}}",
        f"\\textbf{{{word}}}",
        f"**{word}**",
        f"\u201c{word}\u201d",
        f"{word}.",
    ]
    wrong = [
        other,
        f"\\text{{{other}}}",
        f"not {word}",
        f"{word} or {other}",
        f"{word[::-1]}x",
        f"{word}, {other}",
        f"{word} and {other}",
    ]
    for gold in (word, f"\\text{{{word}}}"):
        yield gold, True, right
        yield (
            gold,
            False,
            [*wrong, f"neither {word} nor {other}", f"either {word} or {other}", word[:-1], "5", f"not {word.lower()}"],
        )


FORMS: dict[str, tuple[str, Callable[[random.Random], Made]]] = {
    "intervals": ("For which x does it hold?", intervals),
    "tuples": ("Which point is it?", tuples),
    "lists": ("What are all solutions x?", lists),
    "polynomials": ("What is the expression in x?", polynomials),
    "surds": ("What is x?", surds),
    "matrices": ("What is the matrix?", matrices),
    "clocks": ("What is the time or the ratio?", clocks),
    "choices": ("Which is right? (A) 11 (B) 12 (C) 13 (D) 14 (E) 15", choices),
    "words": ("Which one is it?", words),
}  # fmt: skip
