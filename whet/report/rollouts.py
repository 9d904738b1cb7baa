"""Finds rollouts in RUN/rollouts: a selection for a page that stands alone, and the answers of one that is served.

A run may hold a hundred thousand rollouts. So nothing is read before it is asked for, and an index keeps for each line
where it stands and what a reader filters by. Fields of the index are found by their names, without parsing the line:
inside a JSON string a quote never stands without a backslash, so that no text can pass for a field. A file whose size
or time has changed is indexed again; a line that is torn or no JSON is left out.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

from whet.errors import WhetError
from whet.report.arms import number, parse_lines, read_bytes
from whet.report.view import FIRST, read_excerpt, shorten
from whet.run import ROLLOUTS, parse_line, rollout_files

FIELDS = ("prompt_id", "group_id", "phase", "verdict", "level")
VALUE = re.compile(rb'"(?:[^"\\]|\\.)*"|[^",}\s]+')
KEYS = [f'"{name}": '.encode() for name in FIELDS]  # as the writer of the run spells them
PLAIN = re.compile(rb"[a-z0-9 .,:;=+*/()#-]+")  # characters that stand in JSON as they are
ALONE, SERVED = 8_000, 100_000  # characters of a text in a page that stands alone, and in an answer
# what else stands there counts as unjudged
VERDICTS = {verdict: place for place, verdict in enumerate(FIRST)}
READ = 2**28  # bytes that one search reads
AHEAD = 4  # times the bytes of a selection are read to choose from

Shown = dict[str, Any]  # one rollout, as the page takes it


class Line(NamedTuple):
    """Where a rollout stands in its file, and what it can be found by."""

    start: int
    end: int
    prompt_id: str
    group_id: str
    phase: str
    verdict: str
    level: str


class File(NamedTuple):
    step: int
    kind: str  # "step" or "eval"
    path: Path
    stamp: tuple[int, int]  # time and size


class Bookmark(NamedTuple):
    """Where a search goes on: after this line. Searches go from the newest step to the oldest."""

    step: int
    kind: str
    line: int

    @staticmethod
    def read(text: str) -> Bookmark:
        match = re.fullmatch(r"(\d{1,18})\.([a-z]+)\.(-1|\d{1,18})", text)
        if match is None:
            raise WhetError(f'"{text[:40]}" is no place to go on from.')
        return Bookmark(int(match[1]), match[2], int(match[3]))

    def __str__(self) -> str:
        return f"{self.step}.{self.kind}.{self.line}"


def to_json(value: Any) -> str:
    """Strict JSON that is also safe inside an HTML element: no NaN, and no character that could end the element."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(
            json.loads(json.dumps(value), parse_constant=lambda _: None), separators=(",", ":")
        )
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def index_lines(data: bytes) -> list[Line]:
    """The whole lines of a file."""
    lines = []
    start = 0
    while (end := data.find(b"\n", start)) >= 0:
        line = data[start:end]
        if KEYS[0] in line and line.startswith(b"{") and line.endswith(b"}"):
            lines.append(Line(start, end, *(_field(line, key) for key in KEYS)))
        elif (row := parse_line(line)) is not None:  # another writer
            words = ("" if row.get(name) is None else str(row[name]) for name in FIELDS)
            lines.append(Line(start, end, *words))
        start = end + 1
    return lines


def _field(line: bytes, key: bytes) -> str:
    at = line.find(key)
    found = VALUE.match(line, at + len(key)) if at >= 0 else None
    if found is None or found[0] == b"null":
        return ""
    text = found[0].decode(errors="replace")
    if text.startswith('"'):
        text = (parse_line(b'{"": %b}' % found[0]) or {"": ""})[""] if "\\" in text else text[1:-1]
    return intern(text)


def read_shown(row: Mapping[str, Any], kind: str, longest: int) -> Shown:
    """One rollout of any shape as the page takes it; its tokens only if its text is whole and they fit together."""
    excerpt = read_excerpt(row)
    level = row.get("level")
    shown = excerpt | {"kind": kind, "index": int(number(row, "index") or 0)}
    shown |= {"level": None if level is None else str(level)}
    cut = {name: shorten(shown[name], longest) for name in ("prompt", "response", "answer")}
    names = ("prompt_id", "group_id", "phase", "finish", "version", "note", "level")
    cut |= {name: shorten(text, 200) for name in names if isinstance(text := shown[name], str)}
    pieces = row.get("pieces")
    if (
        cut["response"] == excerpt["response"]
        and isinstance(pieces, list)
        and all(isinstance(p, str) for p in pieces)
    ):
        shown["pieces"] = pieces
        for name in ("log_probs", "entropies", "drafted"):
            values = row.get(name)
            if isinstance(values, str if name == "drafted" else list) and len(values) == len(
                pieces
            ):
                shown[name] = values
    return shown | cut


class RolloutShelf:
    """The rollout files of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._indexed: dict[Path, tuple[tuple[int, int], list[Line]]] = {}
        self._counted: dict[Path, tuple[tuple[int, int], int]] = {}

    def files(self) -> list[File]:
        """Newest first; links are left out, since they may lead out of the folder."""
        found = []
        for step, path in (
            [] if (self.folder / ROLLOUTS).is_symlink() else rollout_files(self.folder)
        ):
            try:
                about = path.lstat()
            except OSError:  # cut back in this moment
                continue
            if stat.S_ISREG(about.st_mode):
                found.append(
                    File(step, path.name.split("_")[0], path, (about.st_mtime_ns, about.st_size))
                )
        return sorted(found, reverse=True)

    def overview(self) -> dict[str, Any]:
        files = self.files()
        total = 0
        for file in files:
            known = self._counted.get(file.path)
            if known is None or known[0] != file.stamp:
                known = self._counted[file.path] = (file.stamp, read_bytes(file.path).count(b"\n"))
            total += known[1]
        return {"total": total, "steps": sorted({file.step for file in files}), "rows": None}

    def index(self, file: File) -> list[Line]:
        known = self._indexed.get(file.path)
        if known is None or known[0] != file.stamp:
            known = self._indexed[file.path] = (file.stamp, index_lines(read_bytes(file.path)))
        return known[1]

    def find(
        self,
        *,
        filters: Mapping[str, str],
        step: int | None = None,
        kind: str = "",
        text: str = "",
        after: Bookmark | None = None,
        limit: int = 50,
        each: bool = False,
    ) -> dict[str, Any]:
        """Rollouts that fit, where the next ones begin (or None), and how many were looked at. `filters` are fields of
        a `Line` and their values; `text` is looked for in prompt, response, answer and id, whatever the case of its
        ASCII letters is. With `each` a step gives one rollout of each prompt, a wrong one if there is one. A search
        ends early once it has read much, and can be continued."""
        rows: list[tuple[Bookmark, Shown]] = []
        searched = read = 0
        needle = text.encode(errors="surrogatepass").lower()
        # what every line with the text must contain
        part = max(PLAIN.findall(needle), key=len, default=b"")

        def answer(following: Bookmark | None) -> dict[str, Any]:
            return {
                "rows": [row for _, row in rows],
                "next": following and str(following),
                "searched": searched,
            }

        for file in self.files():
            before = Bookmark(file.step, file.kind, -1)
            if (step is not None and file.step != step) or (kind and file.kind != kind):
                continue
            if after is not None and before[:2] > after[:2]:
                continue
            if read > READ:
                return answer(before)
            lines = self.index(file)
            first = after.line + 1 if after is not None and before[:2] == after[:2] else 0
            fitting = [i for i, line in enumerate(lines) if _fits(line, filters)]
            if each:
                fitting = _one_of_each(lines, fitting)
            fitting = [i for i in fitting if i >= first]
            searched += len(lines) - first
            if not fitting:
                continue
            data = read_bytes(file.path)
            read += len(data)
            if part and part not in data.lower():
                continue
            for i in fitting:
                line = data[lines[i].start : lines[i].end]
                row = parse_line(line) if not part or part in line.lower() else None
                if row is None or not _holds({**row, "step": file.step}, needle):
                    continue
                if len(rows) == limit:
                    searched -= len(lines) - i
                    return answer(rows[-1][0])
                shown = read_shown({**row, "step": file.step}, file.kind, SERVED)
                rows.append((Bookmark(file.step, file.kind, i), shown))
        return answer(None)

    def select(self, budget: int) -> list[Shown]:
        """Whole groups that take at most `budget` bytes: from the newest step, the oldest, and evenly between them,
        groups with right and wrong rollouts and others in turn. The early steps come first."""
        files = self.files()
        waiting = list[Iterator[list[Shown]]]()
        read = 0
        for i in spread(len(files)):
            file = files[len(files) - 1 - i]
            read += file.stamp[1]
            if read > max(AHEAD * budget, file.stamp[1]):
                break
            waiting.append(iter(_groups(file)))
        picked: list[Shown] = []
        while waiting:
            for groups in list(waiting):
                group = next(groups, None)
                size = len(to_json(group))
                if group is None or size > budget:
                    waiting.remove(groups)
                    continue
                budget -= size
                picked += group
        return sorted(picked, key=lambda row: (row["step"], row["kind"] == "eval"))


def spread(count: int) -> list[int]:
    """The places 0 .. count - 1: the last, the first, the middle, the quarters, and so on.

    >>> spread(5), spread(1), spread(0)
    ([4, 0, 2, 3, 1], [0], [])
    """
    order: dict[int, None] = {}
    parts = 1
    while len(order) < count:
        order |= dict.fromkeys(round(k * (count - 1) / parts) for k in range(parts, -1, -1))
        parts *= 2
    return list(order)


def _groups(file: File) -> list[list[Shown]]:
    """Mixed groups and others in turn, as far as there are both; each in the order of the file."""
    groups: dict[tuple[str, str], list[Shown]] = {}
    for row in parse_lines(read_bytes(file.path)):
        shown = read_shown({**row, "step": file.step}, file.kind, ALONE)
        groups.setdefault((shown["prompt_id"], shown["group_id"]), []).append(shown)
    mixed: list[list[Shown]] = []
    others: list[list[Shown]] = []
    for group in groups.values():
        (mixed if len({row["verdict"] for row in group}) > 1 else others).append(group)
    both = min(len(mixed), len(others))
    in_turn = [group for pair in zip(mixed, others, strict=False) for group in pair]
    return in_turn + mixed[both:] + others[both:]


def _fits(line: Line, filters: Mapping[str, str]) -> bool:
    """A part of the prompt's id is enough, as in a page that stands alone."""
    found = ((key, getattr(line, key), wanted) for key, wanted in filters.items())
    return all(
        wanted in value if key == "prompt_id" else wanted == value for key, value, wanted in found
    )


def _one_of_each(lines: Sequence[Line], fitting: Sequence[int]) -> list[int]:
    chosen: dict[str, int] = {}
    for i in sorted(fitting, key=lambda i: VERDICTS.get(lines[i].verdict, 1)):
        chosen.setdefault(lines[i].prompt_id, i)
    return sorted(chosen.values())


def _holds(row: Mapping[str, Any], needle: bytes) -> bool:
    if not needle:
        return True
    excerpt = read_excerpt(row)
    texts = (
        excerpt[name].encode(errors="surrogatepass")
        for name in ("prompt", "response", "answer", "prompt_id")
    )
    return any(needle in text.lower() for text in texts)
