r"""Whole responses for judging_pairs.py: answers in prose, with negations, corrections, hedges and several boxes.

Each function draws numbers and tells of them as a model might; what counts is what a careful reader takes for the
answer in the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

Told = Iterator[tuple[str, bool, list[str]]]
"""The reference, whether the responses are right, the responses."""


def plain(rng: random.Random) -> Told:
    n, m = rng.sample(range(12, 999), 2)
    right = [
        f"The answer is {n}.", f"So the final answer is **{n}**.", f"Adding up, we get {m} + {n - m} = {n}.\n#### {n}",
        f"Answer: {n}", f"**Answer**: {n}", f"Final Answer: ${n}$", f"Therefore, there are {n} apples left.",
        f"It is {n}.", f"{n}", f"The answer is \\({n}\\).", f"Thus the result is $x = {n}$.", f"I get {n}.",
        f"The answer is: {n}\n\nI hope it is correct.", f"Hence the total is {n} apples.", f"The answer is {n} apples.",
        f"We conclude that the answer is ${n}$, as wanted.", f"The correct answer is {n}", f"The final answer is {n}!",
        f"Of the {m} apples, {n} are left.", f"The answer is therefore {n}.", f"The answer: {n}", f"ANSWER: {n}",
    ]  # fmt: skip
    yield str(n), True, right
    yield str(m), False, right


def corrected(rng: random.Random) -> Told:
    """First m, then n: a reader takes n."""
    n, m = rng.sample(range(12, 999), 2)
    tales = [
        f"The answer is {m}. Wait, it is {n}.", f"The answer is {m}. No, that is wrong: the answer is {n}.",
        f"The answer is {m}. Wait, I made a mistake. The answer is {n}.", f"The answer is {m}, no, {n}.",
        f"The answer is not {m} but {n}.", f"The answer is {m}. Hmm, actually it should be {n}.",
        f"The answer is {m}. Let me check again. It is {n}.", f"\\boxed{{{m}}} is wrong. It is \\boxed{{{n}}}.",
        f"\\boxed{{{m}}}\nWait, I forgot a term, so \\boxed{{{n}}}.", f"I first thought {m}, but the answer is {n}.",
        f"Answer: {m}\nCorrection: {n}", f"The answer is {m}. Sorry, I meant {n}.", f"It is {m}. No, it is {n}.",
        f"The answer is {m}. Actually, no. The answer is {n}.", f"The answer is {m}? No: {n}.",
    ]  # fmt: skip
    yield str(n), True, tales
    yield str(m), False, tales


def denied(rng: random.Random) -> Told:
    """None of these gives n as the answer."""
    n, m = rng.sample(range(12, 999), 2)
    yield str(n), False, [
        f"not {n}", f"The answer is not {n}.", f"The answer isn't {n}.", f"It cannot be {n}.", f"It is not {n}.",
        f"\\boxed{{not {n}}}", f"\\boxed{{\\text{{not }} {n}}}", f"\\boxed{{\\text{{anything but }}{n}}}",
        f"The answer is less than {n}.", f"The answer is more than {n}.", f"The answer is at least {n}.",
        f"The answer is never {n}.", f"The answer is either {n} or {m}.", f"The answer is {n} or {m}.",
        f"The answer is between {m} and {n}.", f"\\boxed{{{n}}} or \\boxed{{{m}}}", f"\\boxed{{{m}}} or \\boxed{{{n}}}",
        f"The answer is {n} thousand.", f"The answer is {n} dozen.", f"The answer is {n} squared.",
        f"The answer is half of {n}.", f"The answer is {m} and not {n}.", f"\\boxed{{{m} \\text{{, not }} {n}}}",
        f"The answer is anything but {n}.", f"The answer is {n} percent of {m}.", f"\\boxed{{{n} \\neq x}}",
        f"<think>The answer is {n}.</think> I do not know.", f"The answer is {n}{m}.", f"The answer is {n} + {m}.",
        f"The answer is greater than {n}.", f"The answer is {n}.{m}.", f"The answer is {n} / {m}.", f"not {n} apples",
    ]  # fmt: skip
    yield str(n), True, [
        f"The answer is {n}, not {m}.", f"\\boxed{{{n}}}, not {m}.", f"It is not {m}. The answer is {n}.",
        f"There is no other way: the answer is {n}.", f"The answer is {n} and nothing else.", f"No doubt: {n}.",
    ]  # fmt: skip


def several(rng: random.Random) -> Told:
    n, m = rng.sample(range(12, 999), 2)
    both = [
        f"The answers are \\boxed{{{n}}} and \\boxed{{{m}}}.", f"\\boxed{{{n}, {m}}}",
        f"\\boxed{{{m}}}, \\boxed{{{n}}}",
        f"The answer is {n} and {m}.", f"\\[\\boxed{{{n}}} \\quad \\text{{and}} \\quad \\boxed{{{m}}}\\]",
        f"The answer is $x = {n}$ or $x = {m}$.", f"Answer: {m}, {n}",
    ]  # fmt: skip
    yield f"{n}, {m}", True, both
    yield str(n), False, both
    yield f"{n}, {m}", False, [f"\\boxed{{{n}}}", f"The answer is {m}.", f"\\boxed{{{n}}} and \\boxed{{{m + 1}}}"]


def letters(rng: random.Random) -> Told:
    a, b = rng.sample("ABCDE", 2)
    n = rng.randint(11, 99)
    right = [
        f"{a}", f"({a})", f"{a}.", f"({a.lower()})", f"{a.lower()}", f"The answer is {a}.", f"The answer is ({a}).",
        f"The correct option is {a}.", f"The answer is **{a}**.", f"Answer: {a}", f"Answer: ({a}) {n}", f"Option {a}",
        f"The answer is ({a}) {n}.", f"The correct answer is {a}: {n}.", f"**{a}**", f"{a}) {n}", f"\\boxed{{{a}}}",
        f"The answer is $\\textbf{{({a})}}$.", f"The answer is option {a}.", f"So it is ({a}).",
        f"\\boxed{{({a})\\ {n}}}",
    ]  # fmt: skip
    yield a, True, right
    yield b, False, right
    yield a, False, [
        f"The answer is not {a}.", f"The answer is {a} or {b}.", f"{a} or {b}", f"It is either {a} or {b}.", f"not {a}",
        f"The answer is {a}. Wait, it is {b}.", "I do not know.", f"The answer is neither {a} nor {b}.", f"{a} and {b}",
        f"A farmer has {n} apples.", f"The answer is {n}.", f"\\boxed{{{a}}} or \\boxed{{{b}}}", f"{a}, {b}", f"{a}{b}",
    ]  # fmt: skip


APPLES = "A farmer fills baskets with apples. How many apples are left in the baskets?"
PROSE: dict[str, tuple[str, Callable[[random.Random], Told]]] = {
    "plain prose": (APPLES, plain),
    "corrected": (APPLES, corrected),
    "denied": (APPLES, denied),
    "several": ("What are all solutions?", several),
    "letters": ("Which is right? (A) 11 (B) 12 (C) 13 (D) 14 (E) 15", letters),
}
