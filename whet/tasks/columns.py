"""Which column of a sheet is what: found by the names that public data uses, or said by the recipe's `columns`.

verl's rows (`prompt` as chat messages, `reward_model.ground_truth`), TRL's (`prompt`, `answer` or `solution`) and the
usual benchmarks (`problem`, `question`) need no word in the recipe. Called by `text.py`; what a cell says is for
`cells.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from whet.errors import WhetError
from whet.tasks.options import did_you_mean
from whet.tasks.reading import Sheet

ROLES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "problem", "question", "input", "query", "instruction", "messages"),
    "answer": (
        "answer",
        "reward_model.ground_truth",
        "ground_truth",
        "final_answer",
        "target",
        "expected_answer",
        "gold",
        "label",
    ),
    "solution": ("solution",),
    "id": ("id",),
    "level": ("level", "difficulty"),
}
"""The first that is there is taken."""


def find_columns(sheet: Sheet, given: Mapping[str, str]) -> dict[str, str]:
    """Role -> column, for the roles that have one. A column given as "" means that there is none.

    Without an answer column the solution holds the answer, too (TRL's `prompt` and `solution`).
    """
    for role, name in given.items():
        if role not in ROLES:
            raise WhetError(f'columns has no "{role}"{did_you_mean(role, ROLES)}')
        if name and name not in sheet.names:
            raise WhetError(f'{sheet.origin} has no column "{name}"; it has {", ".join(sheet.names)}.')
    found = {role: given.get(role, next((n for n in names if n in sheet.names), "")) for role, names in ROLES.items()}
    if not found["prompt"]:
        raise WhetError(_none_found(sheet, "prompt"))
    if not found["answer"] and "answer" not in given:
        if not found["solution"]:
            raise WhetError(_none_found(sheet, "answer"))
        found["answer"] = found["solution"]
    return {role: name for role, name in found.items() if name}


def _none_found(sheet: Sheet, role: str) -> str:
    return (
        f"{sheet.origin} has no column for the {role} ({', '.join(ROLES[role])}); it has "
        f'{", ".join(sheet.names) or "none"}: name yours by columns = {{ {role} = "..." }}.'
    )
