"""Task "gym": the problem generators of reasoning-gym and their own scores (extra `gym`).

Options name the dataset, the number of problems, the settings of the dataset itself (min_terms = 2), and its
difficulty (levels = { num_terms = 2 }): an entry of reasoning-gym's curriculum for the dataset, counted from 0. One
problem in four, chosen by a hash of the question, is held out: eval draws only from these and train never does,
whatever their settings and seeds. reasoning-gym scores the one final answer of a response.

Some of its scores pass the response to `eval`, or to sympy's parser, which does the same. For these datasets a
response is scored only if it is no program; see GUARDS.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whet.errors import WhetError
from whet.tasks.answers import after_thinking, boxed, in_tags, last_number, marked
from whet.tasks.base import PromptTable, check_range, did_you_mean, read_options
from whet.types import Prompt

CHUNK = 500  # size of the datasets that are made; always the same, since some problems depend on it
PATIENCE = 400  # draws in a row without a new problem after which a dataset counts as exhausted
LONGEST = 20_000  # characters of the longest answer that is scored: a grid may be long

# The problems of one level: settings of the dataset, and the sum of the wanted levels (None where none are wanted).
Part = tuple[Mapping[str, Any], int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GymOptions:
    dataset: str = "chain_sum"
    train_count: int = 1000  # all different; a dataset that runs out gives fewer
    eval_count: int = 200
    # Attribute of the curriculum -> its level, or a list of levels to mix evenly; the others stay at their default.
    levels: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_range("Task gym", "train_count", self.train_count, 1, 10_000_000)
        check_range("Task gym", "eval_count", self.eval_count, 1, 10_000_000)


class GymTask:
    """`name` must differ for tasks with different options: some scores depend on the settings of the dataset."""

    alphabet = ""

    def __init__(self, name: str = "gym", **options: Any) -> None:
        self.name = name
        factory = _reasoning_gym()
        own = {
            f.name: options.pop(f.name) for f in dataclasses.fields(GymOptions) if f.name in options
        }
        self.options = read_options(GymOptions, own, "Task gym")
        name = self.options.dataset
        datasets = factory.DATASETS
        if name == "composite":
            raise WhetError(
                "Task gym takes one dataset per entry; write a [[data]] entry with a weight for each instead."
            )
        if name not in datasets:
            raise WhetError(
                f'Task gym: reasoning-gym has no dataset "{name}"{did_you_mean(name, datasets)}'
            )
        known = {f.name for f in dataclasses.fields(datasets[name][1])} - {"seed", "size"}
        if unknown := next((key for key in options if key not in known), None):
            raise WhetError(
                f'Task gym: the dataset {name} has no setting "{unknown}"{did_you_mean(unknown, known)}'
            )
        self._parts = _parts(factory, self.options, options)
        self._scorers = [self._make(part, size=1, seed=0) for part in self._parts]

    def prompts(self, split: str, seed: int) -> PromptTable:
        """meta: `item` is what the score needs; `level` and `part` say how hard, where the recipe names levels."""
        count = self.options.train_count if split == "train" else self.options.eval_count
        shares = [
            count // len(self._parts) + (i < count % len(self._parts))
            for i in range(len(self._parts))
        ]
        rows = [
            (number, item)
            for number, share in enumerate(shares)
            for item in itertools.islice(self._problems(number, split == "eval", seed), share)
        ]
        rows = [rows[i] for i in np.random.default_rng([seed, len(rows)]).permutation(len(rows))]
        if rows and _score(self._scorers[rows[0][0]], "?!", rows[0][1]) >= 0.99:
            raise WhetError(
                f"Task gym: reasoning-gym takes any answer to {self.options.dataset} for a right one."
            )
        meta: dict[str, list[Any]] = {"item": [item for _, item in rows]}
        if self.options.levels:
            meta |= {
                "part": [number for number, _ in rows],
                "level": [self._parts[number][1] for number, _ in rows],
            }
        return PromptTable(
            [item["question"] for _, item in rows],
            [str(item["answer"] or "") for _, item in rows],
            self.name,
            meta=meta,
            origin=f"The {split} split of reasoning-gym's {self.options.dataset}",
        )

    def judge(self, prompt: Prompt, response: str) -> float:
        """reasoning-gym's score, unchanged: some of its datasets give part of it to a wrong answer."""
        item = prompt.meta["item"]
        scorer = self._scorers[prompt.meta.get("part", 0)]
        said = after_thinking(response).strip()
        reference = item["answer"] or ""
        # One answer in the form of the reference: a number, or as many lines, from the end unless it is pointed out.
        height = len(reference.splitlines()) or 1
        answer = _pointed(said, marks=height == 1 and not marked(reference))
        if reference and last_number(reference) == reference:
            answer = last_number(answer or said) or answer
        elif not answer:
            answer = "\n".join(said.splitlines()[-height:]) if reference else said
        harmless = GUARDS.get(self.options.dataset, lambda answer: True)
        return _score(scorer, answer if len(answer) <= LONGEST and harmless(answer) else None, item)

    def final(self, response: str) -> str:
        said = after_thinking(response).strip()
        answer = _pointed(said) or last_number(said) or said.rpartition("\n")[2]
        return " ".join(answer.split()).rstrip(".").casefold() if len(answer) <= LONGEST else ""

    def solutions(
        self, rng: np.random.Generator, count: int, **options: Any
    ) -> list[tuple[Prompt, str]]:
        raise WhetError(
            "Task gym has no worked solutions to imitate; leave [[warm_start]] out, or take other data."
        )

    def _problems(self, number: int, held_out: bool, seed: int) -> Iterator[dict[str, Any]]:
        """Different problems, until none is new."""
        seen: set[str] = set()
        barren = 0
        for chunk in itertools.count():
            # A seed far from any other: the i-th problem of most datasets depends only on seed + i.
            (state,) = np.random.SeedSequence((seed, number, chunk)).generate_state(1)
            dataset = self._make(self._parts[number], size=CHUNK, seed=int(state >> 1))
            for i in range(CHUNK):
                item = self._try("cannot make a problem", dataset.__getitem__, i)
                barren += 1
                if is_held_out(item["question"]) == held_out and item["question"] not in seen:
                    barren = 0
                    seen.add(item["question"])
                    yield item
                if barren > PATIENCE:
                    return

    def _make(self, part: Part, size: int, seed: int) -> Any:
        create = _reasoning_gym().create_dataset
        return self._try(
            "refuses its settings", create, self.options.dataset, size=size, seed=seed, **part[0]
        )

    def _try(self, what: str, call: Callable[..., Any], *given: Any, **settings: Any) -> Any:
        try:
            with _quiet():
                return call(*given, **settings)
        except Exception as error:  # mostly assertions, and whatever a wrong type leads to
            message = str(error) or type(error).__name__
            raise WhetError(
                f"Task gym: the dataset {self.options.dataset} {what}: {message}."
            ) from error


def is_held_out(question: str) -> bool:
    """One problem in four."""
    return (
        hashlib.blake2b(question.encode("utf-8", "surrogatepass"), digest_size=1).digest()[0] < 64
    )


# Lists of numbers and capital letters. Small letters could spell a variable of the score, which holds the right answer,
# or a loop, which can set `__class_getitem__` of a class: then its brackets call any function.
is_data = re.compile(r"[0-9A-Z_\[\],'\"\s-]*").fullmatch
# Numbers and the four operations. With a letter, x / x would be a 1 that the problem does not give.
is_sum = re.compile(r"[0-9+\-*/()\s]*\.?\s*").fullmatch


def is_formula(answer: str) -> bool:
    """Numbers, letters and functions of calculus. No `Integral`: its derivative is right without any work."""
    return bool(_FORMULA.fullmatch(answer)) and all(
        w in _FUNCTIONS for w in _WORD.findall(answer) if len(w) > 1
    )


_FORMULA = re.compile(r"[0-9A-Za-z_+\-*/^().,\s]*")
_WORD = re.compile(r"[A-Za-z_][0-9A-Za-z_]*")
_FUNCTIONS = {"exp", "log", "ln", "sqrt", "Abs", "pi", "erf"}
_FUNCTIONS |= {
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
}

GUARDS: dict[
    str, Callable[[str], object]
] = {  # datasets whose score evaluates the answer -> what it may be
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), is_data),
    **dict.fromkeys(("countdown", "puzzle24"), is_sum),
    **dict.fromkeys(
        ("polynomial_multiplication", "simple_integration", "intermediate_integration"), is_formula
    ),
}


def _pointed(said: str, *, marks: bool = True) -> str:
    """The answer that a response points out: in tags, boxed, or (a line) after "answer is" and other marks."""
    found = in_tags(said).strip() or boxed(said)
    return found or (marked(said).strip(" .*`$") if marks else "")


def _score(scorer: Any, answer: str | None, item: Mapping[str, Any]) -> float:
    try:
        with _quiet():
            return min(1.0, max(0.0, float(scorer.score_answer(answer, item))))
    except MemoryError:
        raise
    except Exception:  # the score cannot read what the model wrote
        return 0.0


def _parts(factory: Any, options: GymOptions, settings: Mapping[str, Any]) -> list[Part]:
    """One part for each combination of the wanted levels."""
    if not options.levels:
        return [(settings, None)]
    if not factory.has_curriculum(options.dataset):
        raise WhetError(
            f"Task gym: the dataset {options.dataset} has no levels; use its own settings."
        )
    curriculum = factory.create_curriculum(options.dataset)
    choices = {
        name: _levels(curriculum, options.dataset, name, level)
        for name, level in options.levels.items()
    }
    for name in choices:
        if twice := set(_fields(curriculum.attributes[name])) & settings.keys():
            raise WhetError(
                f"Task gym: {min(twice)} is set by levels.{name} already; leave one of the two out."
            )
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode

    parts: list[Part] = []
    # by default it takes all levels up to these
    exactly = DefaultCurriculumContext(RangeAttributeMode.UPPER_BOUND)
    for levels in itertools.product(*choices.values()):
        for name, level in zip(choices, levels, strict=True):
            curriculum.set_attr_level(name, level)
        made = curriculum.generate_configuration(context=exactly)
        fields = [
            name for attribute in curriculum.attributes.values() for name in _fields(attribute)
        ]
        parts.append(({**{name: getattr(made, name) for name in fields}, **settings}, sum(levels)))
    return parts


def _levels(curriculum: Any, dataset: str, name: str, asked: Any) -> list[int]:
    if name not in curriculum.attributes:
        raise WhetError(
            f'Task gym: {dataset} has no levels of "{name}"{did_you_mean(name, curriculum.attributes)}'
        )
    values = curriculum.attributes[name].levels
    listed = asked if isinstance(asked, list) and asked else [asked]
    for level in listed:
        if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level < len(values):
            raise WhetError(
                f"Task gym: levels.{name} = {asked!r} is wrong: {dataset} has levels 0 to {len(values) - 1} of it, "
                f"from {values[0]} to {values[-1]}."
            )
    return list(dict.fromkeys(listed))


def _fields(attribute: Any) -> list[str]:
    """The settings that an attribute of a curriculum sets."""
    names = ("field_name", "lower_field_name", "upper_field_name")
    return [getattr(attribute, name) for name in names if hasattr(attribute, name)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Some datasets print, and some leave files open."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _reasoning_gym() -> Any:
    try:
        with _quiet():
            from reasoning_gym import factory
    except ImportError as error:
        raise WhetError(
            f'Task gym needs reasoning-gym ({error}): pip install "whet[gym]".'
        ) from None
    return factory
