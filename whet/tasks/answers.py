r"""Which answer a response claims, and which answers of the data are right.

The last statement counts. Everything up to the last "</think>" is dropped first; a response that is still thinking
claims nothing. Then the option `answer` names one of ANSWERS. "auto" reads the last box where there is one, else what
is marked ("answer is", "####"), else a lone letter, else the last number, unless what follows takes it back:
"5. Wait, it is 6" claims 6, and "5 is wrong" claims nothing.
Responses are hostile: an answer longer than 300 characters is none, and every pattern runs in linear time.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import deque
from collections.abc import Callable
from functools import lru_cache

from whet.errors import WhetError
from whet.tasks import formulas
from whet.tasks.base import did_you_mean, problem_text
from whet.tasks.equality import canonical, same_answer
from whet.tasks.formulas import LONGEST
from whet.tasks.values import CHANGERS, tidy
from whet.types import Prompt

MATCHERS = ("exact", "math")

_BOX = "\\boxed{"
_SPACED_BOX = re.compile(r"\\f?boxed ?\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is none
_JOINT = re.compile(
    r"(?:[\s$,;}]|\\[,;:\[\]()]|\\q?quad|\\text\{[ ,]*(?:and|or)[ ,]*\}|\band\b|\bor\b){0,12}"
)

_MARKER = re.compile(
    r"####|#(?=[^\s#])|answer(?:\*\*)?(?:\s?:|\s?is\b)|(?:option|choice)\s?is\b", re.IGNORECASE
)
_NUMBER = r"[-+]?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?"
_NUMBER_IN_TEXT = re.compile(rf"(?<![\w.]){_NUMBER}")
_LONE_LETTER = re.compile(
    r"(?:[Oo]ption |[Cc]hoice )?\(?[A-Ja-j]\)?[.:)]?|\(?[A-J][.:)]\s[^\n]{1,80}"
)
_LETTER_IN_TEXT = re.compile(r"\([A-J]\)(?![A-Za-z(])|(?<=\bis )[A-J](?=[.,]?\s*$)")

# A doubt that no other claim follows changes nothing: "Let me check: 2 + 3 = 5. Yes."
_DOUBT = re.compile(
    r"\b(?:wait|actually|sorry|hmm|oops|correction|mistake|error|check|second thought|scratch that|contradicts|i mean"
    r"|i meant|should be|wrong|incorrect|cannot be|no(?=[,:.]))\b",
    re.IGNORECASE,
)
_OTHER_CLAIM = re.compile(
    rf"(?:^|\b(?:it|that|answer|result)(?:\s(?:really\s)?is|'s)\b|\bbe\b|\bso\b)(?:\s|\$|\*\*)*({_NUMBER})"
    r"(?=[\s$*]*(?:[.,;!?]|$)|\s[A-Za-z]+(?:[.,!?]|$))",
    re.IGNORECASE,
)
_REFUTED = re.compile(  # right after a claim
    r"[\s$*.,)]*(?:\?\s*(?:no\b|that is not\b)|(?:(?:that|this|it|which)\s+)?(?:fails\b|(?:is|was)\s+(?:wrong|"
    r"incorrect|false|not\s+[a-z])|(?:does|do|did|can|could)(?:\s?not|n't)\b))",
    re.IGNORECASE,
)
_FORMULA_AT_THE_END = re.compile(r"\$([^$\n]+)\$[\s.*]*$")
_DENIED = re.compile(  # right before a number
    r"(?:\b(?:not?|never|cannot|than|least|most|or|nor|but|over|under|twice)|n't)(?:\s+(?:be|a|the))?\s*$",
    re.IGNORECASE,
)
_CHANGED = re.compile(  # right after a number
    r"\s(?:hundred|thousand|million|billion|trillion|dozen|squared|cubed|or (?:more|less|fewer))\b",
    re.IGNORECASE,
)
_NOT_BUT = re.compile(r"not\s+\S{1,40}\s+but\s+", re.IGNORECASE)
_NOT_AFTER = re.compile(r",?\s+(?:and\s+)?(?:not|nothing)\b.*", re.IGNORECASE | re.DOTALL)
_RESTATED = re.compile(r".*(?:\bi\.e\.|\bthat is,?(?=\s[0-9$\\]))", re.IGNORECASE | re.DOTALL)
_REASON = re.compile(
    r",?\s+(?:(?:since|because)\s.*|(?:as|which|so|where|and nothing)\s[^0-9=$\\]*)$", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"\n|(?<!\\)(?<!i\.e)[.?!] ")
_SUBJECT = re.compile(r"[A-Za-z][^=0-9]*\s(?:is|are|equals)\s+(?=\S)", re.IGNORECASE)
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{2,}")


class Matcher:
    """`answer` says where the answer is; `matcher` whether formulas are compared, or only text and numbers."""

    def __init__(self, matcher: str = "math", answer: str = "auto") -> None:
        if matcher not in MATCHERS:
            raise WhetError(f'There is no matcher "{matcher}"{did_you_mean(matcher, MATCHERS)}')
        if answer not in ANSWERS:
            raise WhetError(
                f'There is no way to find an answer called "{answer}"{did_you_mean(answer, ANSWERS)}'
            )
        self.matcher = matcher
        self.answer = answer
        if matcher == "math":
            formulas.warm()

    def judge(self, prompt: Prompt, response: str) -> float:
        r"""1.0 if the response's final answer equals the prompt's, else 0.0. May raise TooSlow."""
        found = self.extract(response)
        golds = right_answers(prompt.answer)
        question = problem_text(prompt.text or prompt.messages)
        # All are compared without formulas first, which may be slow.
        with_formulas = (False, True) if self.matcher == "math" else (False,)
        for slowly in with_formulas:
            if any(same_answer(found, gold, question, formulas=slowly) for gold in golds):
                return 1.0
        return 0.0

    def final(self, response: str) -> str:
        """The answer in a form in which equal answers mostly read the same; "" for none."""
        return canonical(self.extract(response))[:LONGEST]

    def extract(self, response: str) -> str:
        """The answer as it is written, or ""."""
        return ANSWERS[self.answer](tidy(after_thinking(response)))


# ---- where the answer is


@lru_cache(maxsize=4096)
def right_answers(answer: str) -> tuple[str, ...]:
    r"""The data's answer, the end of a worked solution, or each text of a JSON list: any of these is right."""
    if answer.startswith('["') and answer.endswith('"]'):
        with contextlib.suppress(ValueError, RecursionError):
            return tuple(str(one) for one in json.loads(answer))
    return (boxed(answer) or answer.rpartition("####")[2].strip(),)


def after_thinking(response: str) -> str:
    """What follows the last "</think>"; "" for a response that is still thinking."""
    rest = response.rpartition("</think>")[2]
    return "" if "<think>" in rest else rest


def auto(text: str) -> str:
    if start := _last_box(text):
        after = text[start + len(_inside(text, start)) : start + 3 * LONGEST]
        return _revised(boxed(text), after.partition("}")[2])
    return marked(text) or lone_letter(text) or _formula_at_the_end(text) or last_claim(text)


def boxed(text: str) -> str:
    r"""What the last \boxed{...} holds, braces balanced; "" where it is not closed. One more box may stand before it.

    >>> boxed(r"so \boxed{\frac{1}{2}}."), boxed(r"so \boxed{1"), boxed(r"\boxed{1} and \boxed{2}")
    ('\\frac{1}{2}', '', '1, 2')
    """
    start = _last_box(text)
    last = _inside(text, start).strip()
    before = text.rfind(_BOX, max(0, start - LONGEST - 40), max(0, start - len(_BOX)))
    if before < 0 or not last:
        return last
    first = _inside(text, before + len(_BOX))
    joint = (
        text[before + len(_BOX) + len(first) : start - len(_BOX)].strip().removeprefix("}").strip()
    )
    is_list = (
        "\n" not in joint and _JOINT.fullmatch(joint) and before + len(_BOX) + len(first) < start
    )
    if not is_list or first.strip() in ("", last):
        return last
    return _short(f"{first.strip()}, {last}")


def _last_box(text: str) -> int:
    """Where the inside of the last box begins; 0 for no box."""
    start = text.rfind(_BOX)
    if start >= 0:
        return start + len(_BOX)
    last = _last(_SPACED_BOX, text)
    return last.end() if last else 0


def _inside(text: str, start: int) -> str:
    """The text from `start` to the brace that closes the box; "" if none does."""
    inside = text[start : start + LONGEST + 1] if start else ""
    depth = 1
    for brace in _BRACE.finditer(inside):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return inside[: brace.start()]
    return ""


def tagged(text: str) -> str:
    return _short(in_tags(text))


def in_tags(text: str) -> str:
    """What the last pair of answer tags holds, however long; "" for none."""
    _, opened, inside = text.rpartition("</answer>")[0].rpartition("<answer>")
    return inside if opened else ""


def marked(text: str) -> str:
    """What the last marker introduces, to the end of its sentence, unless the text takes it back.

    >>> marked("The answer is 5. Wait, it is 6."), marked("The answer is not 5 but 6"), marked("The answer is not 5")
    ('6', '6', 'not 5')
    """
    last = _last(_MARKER, text)
    if last is None:
        return ""
    rest = (
        text[last.end() : last.end() + 2 * LONGEST]
        .lstrip(" \t\r\n:*_$")
        .removeprefix("\\[")
        .lstrip()
    )
    ends = [
        found.start() for found in (_SENTENCE_END.search(rest), _DOUBT.search(rest, 1)) if found
    ]
    end = min(ends, default=len(rest))
    return _revised(_claim_of(rest[:end]), rest[end:])


def _claim_of(sentence: str) -> str:
    """The answer within a sentence: "5" of "5, not 6", "5 since 6 fails" and "a half, i.e. 5"."""
    sentence = sentence.rstrip(" *_-,")
    if not sentence.endswith("$"):
        sentence = sentence.rstrip("!").removesuffix("**.").rstrip(" *_")
    sentence = sentence.removesuffix("$.")
    for aside in (_REASON, _RESTATED):
        sentence = aside.sub("", sentence)
    sentence = _NOT_BUT.sub("", sentence, count=1)
    sentence = _NOT_AFTER.sub("", sentence).strip() or sentence
    verb = _SUBJECT.match(sentence)
    if verb is not None and not _DENIED.search(verb[0]):
        sentence = sentence[verb.end() :]
    words = _WORD.findall(sentence)
    if (
        len(words) > 4
        and sentence[0].isalpha()
        and not CHANGERS.intersection(map(str.casefold, words))
    ):
        return last_claim(sentence)  # a whole sentence in words, which holds the answer somewhere
    return _short(sentence)


def _revised(claim: str, after: str) -> str:
    """The claim, or what the text after it puts in its place; "" where it is only taken back."""
    doubt = _last(_DOUBT, after)
    if doubt is not None:
        then = after[doubt.end() :].lstrip(" ,:.-")
        numbers = _last(_OTHER_CLAIM, then)
        if other := marked(then) or lone_letter(then) or (numbers[1] if numbers else ""):
            return other
    return "" if _REFUTED.match(after) else claim


def lone_letter(text: str) -> str:
    """A choice where the response is nothing else, or where it gives no number but ends with one.

    >>> lone_letter("**B**"), lone_letter("C) 12"), lone_letter("So it is (A)."), lone_letter("A farmer has 12 apples.")
    ('B', 'C) 12', '(A)', '')
    """
    short = text[-LONGEST:].strip(" *_\r\n\t,")
    if len(text) <= LONGEST and _LONE_LETTER.fullmatch(short):
        return short
    last = _last(_LETTER_IN_TEXT, short.rpartition("\n")[2])
    if last is None or _NUMBER_IN_TEXT.search(short) or _DENIED.search(short[: last.start()]):
        return ""
    return last.group()


def _formula_at_the_end(text: str) -> str:
    """What stands between the last dollar signs, where the response ends with them: "so it is $(7, 6)$."."""
    found = _FORMULA_AT_THE_END.search(text[-LONGEST:])
    return found[1] if found and not _DENIED.search(text[-LONGEST:][: found.start()]) else ""


def last_number(text: str) -> str:
    last = _last(_NUMBER_IN_TEXT, text)
    return _short(last.group().rstrip(",")) if last is not None else ""


def last_claim(text: str) -> str:
    """The last number that is not refuted, with the word that denies or changes it, if any.

    >>> last_claim("we get 3, then 1,234.5"), last_claim("It is not 5."), last_claim("some 5 million, as 6 fails")
    ('1,234.5', 'not 5', '5 million')
    """
    numbers = deque(_NUMBER_IN_TEXT.finditer(text, max(0, len(text) - 4000)), maxlen=4)
    standing = [found for found in numbers if not _REFUTED.match(text, found.end())]
    if not standing:
        return "" if numbers else last_number(text)
    last = standing[-1]
    before = re.split(
        r"\n|[.?!:] ", _NOT_BUT.sub("", text[max(0, last.start() - 60) : last.start()])
    )[-1]
    denied = _DENIED.search(before)
    changed = _CHANGED.match(text, last.end())
    number = last.group().rstrip(",")
    return _short(f"{denied[0].lstrip() if denied else ''}{number}{changed[0] if changed else ''}")


def _short(text: str) -> str:
    return text.strip() if len(text) <= LONGEST else ""


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match. The end is searched first: the last match of a long response is mostly there."""
    for start in dict.fromkeys((max(0, len(text) - 4000), 0)):
        if found := deque(pattern.finditer(text, start), maxlen=1):
            return found[0]
    return None


ANSWERS: dict[str, Callable[[str], str]] = {
    "auto": auto,
    "boxed": boxed,  # the last \boxed{...}
    "tagged": tagged,  # the last <answer>...</answer>
    "marked": marked,  # what follows the last "####", "#" or "answer is"
    "last_number": last_number,
    "whole": _short,  # all of it
}


# ---- long and structured answers, compared whole, in a time linear in the response

_FENCED = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
# 2.0 is 2
_DECODER = json.JSONDecoder(
    parse_float=lambda text: int(x) if (x := float(text)).is_integer() else x
)


def same_whole(response: str, answer: str, where: str) -> bool | None:
    r"""Whether the response gives a long or structured answer of the data where the option `answer` looks for it.

    Two texts are the same if they differ only in white space, two JSON values if they are equal once read; of several
    JSON values the last is the answer. None where the matcher decides: for a short answer of the data, and for a
    response without a JSON value, or with another text, where the answer is looked for.
    """
    golds = whole_answers(answer)
    text = after_thinking(response) if golds else ""
    found = {_gives(text, gold, where) for gold in golds}
    return True in found or (False if False in found else None)


@lru_cache(maxsize=4096)
def whole_answers(answer: str) -> tuple[str, ...]:
    r"""The right answers that are compared whole.

    >>> whole_answers('{"a": 1}'), whole_answers("72"), whole_answers('["72", "73"]')
    (('{"a": 1}',), (), ())
    """
    if read_json(answer) is not None:
        return (answer,)
    return tuple(_squeeze(one) for one in right_answers(answer) if len(one) > LONGEST)


def read_json(text: str) -> str | None:
    """A JSON object or list, written so that equal values read the same. A list of texts means several answers.

    >>> read_json('{"b": 1.0, "a": true}'), read_json('["a", "b"]'), read_json("[0, 1)"), read_json("3")
    ('{"a": true, "b": 1}', None, None, None)
    """
    fenced = _FENCED.fullmatch(text.strip())
    found = _decode(fenced[1] if fenced else text)
    return found[0] if found is not None and not found[1] else None


def _gives(text: str, gold: str, where: str) -> bool | None:
    wanted = read_json(gold)
    if where in ("auto", "boxed") and _BOX in text:
        inside = text.rpartition(_BOX)[2]
        if wanted is None:
            inside = _squeeze(inside)
            return (
                inside.startswith(gold) and inside.removeprefix(gold).lstrip().startswith("}")
            ) or None
        found = _decode(inside)
        return None if found is None else found[0] == wanted and found[1].startswith("}")
    may_be = {
        "tagged": [in_tags(text)],
        "whole": [text],
        "auto": [text, *_FENCED.findall(text)[-1:]],
    }.get(where, [])
    if where in ("auto", "marked") and (marker := _last(_MARKER, text)):
        may_be.append(text[marker.end() :])
    if wanted is None:
        return any(_squeeze(found) == gold for found in may_be) or None
    read = [*filter(None, map(read_json, may_be))]
    return read[-1] == wanted if read else None


def _squeeze(text: str) -> str:
    return " ".join(text.split())


def _decode(text: str) -> tuple[str, str] | None:
    """The JSON object or list that a text begins with, written in one way, and the text after it."""
    text = text.strip()
    if not text.startswith(("{", "[")):
        return None
    try:
        value, end = _DECODER.raw_decode(text)
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return None
        return json.dumps(value, sort_keys=True), text[end:].lstrip()
    except (ValueError, RecursionError):
        return None
