from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from whet.report.page import Html, escape, tag, write_chapters, write_page

VOID = {"meta", "link"}
HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</noscript></style></pre></dd><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</title><svg/onload=alert(1)>",
    "javascript:alert(1) {{7*7}} ${7*7} <!--DATA-->",
    "nul\x00bell\x07escape\x1b[2J",
    "bidi\u202etxt.exe\u2066 \u2028\u2029",
    "lone surrogate \ud83d",
    "&lt;b&gt; &#60;script&#62;",
    "<!-- <![CDATA[ -->",
    "x" * 1_000_000,
]


class Outline(HTMLParser):
    """Fails on a tag that does not close what is open; keeps tags, attributes, text and the bodies of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: dict[str, list[str]] = {}
        self.text = ""
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(html)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")
        if tag not in VOID:
            self.open.append(tag)
        if tag in self.inside:
            self.inside[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.inside:
            self.inside[self.open[-1]][-1] += data
        else:
            self.text += data

    @property
    def data(self) -> dict:  # type: ignore[type-arg]
        return json.loads(
            self.inside["script"][0], parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
        )


def written(out: Path, folders: list[Path], **options: str) -> Outline:
    write_page(out, folders, **{"title": "Curricula side by side", **options})
    return Outline(out.read_text())


@pytest.fixture
def arms(make_run: Callable[..., Path]) -> list[Path]:
    return [
        make_run(f"{name}-seed{seed}", pace=pace, seed=seed, signal=signal)
        for name, pace, signal in (("uniform", 1.5, 0.2), ("dapo", 2.0, 0.4), ("speed", 3.0, 0.8))
        for seed in range(2)
    ]


def test_a_page_stands_alone_and_is_whole(arms: list[Path], tmp_path: Path) -> None:
    outline = written(tmp_path / "page.html", arms, note="First paragraph.\n\nSecond one.")
    assert not {"link", "img", "iframe", "object", "base", "form"} & set(outline.tags)
    assert not {name for name in outline.attributes if name.startswith("on") or name == "src"}
    assert all(href.startswith("#") for href in outline.attributes.get("href", []))
    assert "uPlot" in outline.inside["script"][1] and len(outline.inside["script"]) == 3
    page = outline.data
    assert (
        page["title"] == "Curricula side by side"
        and page["note"] == "First paragraph.\n\nSecond one."
    )
    assert [arm["name"] for arm in page["arms"]] == ["uniform", "dapo", "speed"]
    assert len(page["runs"]) == 6 and page["live"] is False


def test_the_policy_names_every_script_and_style_and_nothing_else(
    arms: list[Path], tmp_path: Path
) -> None:
    outline = written(tmp_path / "page.html", arms[:1])
    (policy,) = (text for text in outline.attributes["content"] if "default-src" in text)

    def digests(texts: list[str]) -> list[str]:
        return [
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in texts
        ]

    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split() == digests(outline.inside["script"][1:])
    assert rules["style-src"].split() == digests(outline.inside["style"])


def test_without_a_script_the_numbers_are_tables(arms: list[Path], tmp_path: Path) -> None:
    outline = written(tmp_path / "page.html", arms)
    assert "noscript" in outline.tags and outline.tags.count("table") > 6
    for word in (
        "uniform-seed0",
        "How the runs ended",
        "Tokens to accuracy",
        "Learning: +",
        "two evaluations in a row",
        "960k",
    ):
        assert word in outline.text
    single = written(tmp_path / "page.html", arms[:1], title="One <run>").text
    assert "One <run>" in single and "×" not in single  # there is nothing to compare with


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:20]))
def test_model_output_is_text_and_nothing_else(
    text: str, save_run: Callable[..., Path], tmp_path: Path
) -> None:
    rollouts = [
        {
            "step": step,
            "prompt_id": text,
            "group_id": 0,
            "prompt": text,
            "response": text,
            "answer": text,
        }
        | {
            "verdict": "right",
            "length": 3,
            "finish": text,
            "phase": text,
            "version": 1,
            "note": text,
            "level": text,
        }
        | {
            "pieces": [text[:2], text[2:]],
            "log_probs": [-0.5, float("nan")],
            "entropies": [0.1, 0.2],
            "drafted": "01",
        }
        for step in (0, 9)
    ]
    words = dict.fromkeys(("prompt", "response", "answer", "finish", "phase"), "calm")
    calm = written(
        tmp_path / "a.html",
        [save_run("calm", [{"step": 0}], [{**row, **words} for row in rollouts])],
    )
    out = tmp_path / "hostile.html"
    hostile = written(out, [save_run("run", [{"step": 0}], rollouts)])
    assert hostile.tags == calm.tags and hostile.attributes.keys() == calm.attributes.keys()
    assert hostile.inside["script"][1:] == calm.inside["script"][1:]
    html = out.read_text()
    assert len(html) - len((tmp_path / "a.html").read_text()) < 200_000
    assert not {c for c in html if ord(c) < 32 and c not in "\n\t"} and not set(html) & set(
        "\u202e\u2066\u2028"
    )
    rows = hostile.data["runs"][0]["rollouts"]["rows"]
    assert [row["step"] for row in rows] == [0, 9]
    if len(text) < 1000:
        assert all(row["response"] == text and row["prompt"] == text for row in rows)
        assert rows[0]["pieces"] == [text[:2], text[2:]] and rows[0]["log_probs"] == [-0.5, None]
    else:
        assert "characters left out" in rows[0]["response"] and "pieces" not in rows[0]


@pytest.mark.parametrize("text", HOSTILE[:10], ids=lambda text: repr(text[:20]))
def test_names_notes_and_settings_are_text_too(
    text: str, save_run: Callable[..., Path], tmp_path: Path
) -> None:
    rows = [
        {"step": i, "tokens_generated": i, "time_s": i, f"eval/{text}/accuracy": i / 9}
        for i in range(9)
    ]
    a = save_run("a", rows)
    (a / "machine.json").write_text(json.dumps({"hardware": text, "recipe": text}))
    (a / "pictures.jsonl").write_text(
        json.dumps({"step": 1, "arm": text, "flow": {text: 1}}) + "\n"
    )
    write_page(tmp_path / "page.html", {text: a, "b": save_run("b", rows)}, title=text, note=text)
    html = (tmp_path / "page.html").read_text()
    outline = Outline(html)
    assert not {"img", "svg"} & set(outline.tags) and len(outline.inside["script"]) == 3
    assert not {name for name in outline.attributes if name.startswith("on")}
    assert outline.data["title"] == text and outline.data["runs"][0]["headline"]["hardware"] == text
    assert re.findall(r"<!--[A-Z]+-->", html) == []


def test_chapters_share_a_page(arms: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    write_chapters(
        out,
        {"Mix few": (arms[:2], "Few."), "Mix many": (arms[2:], "Many.")},
        title="Demo",
        note="All.",
    )
    outline = Outline(out.read_text())
    assert [(c["title"], c["note"], len(c["runs"])) for c in outline.data["chapters"]] == [
        ("Mix few", "Few.", 2),
        ("Mix many", "Many.", 4),
    ]
    assert outline.data["runs"] == [] and outline.text.index("Mix few") < outline.text.index(
        "Mix many"
    )


def test_a_run_that_has_just_begun_has_a_page(
    save_run: Callable[..., Path], tmp_path: Path
) -> None:
    outline = written(tmp_path / "page.html", [save_run("new", [])])
    assert "Nothing was recorded yet." in outline.text
    (run,) = outline.data["runs"]
    assert (
        run["series"] == {"step": [], "tokens_generated": [], "time_s": []}
        and run["headline"]["accuracy"] is None
    )


def test_reports_load_no_torch() -> None:
    code = """import sys, whet.report.server, whet.report.compare, whet.report.view, whet.report.live
heavy = {"torch", "transformers", "matplotlib"} & set(sys.modules)
assert not heavy, heavy"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_is_replaced_whole(arms: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert written(out, arms[:1]).data != written(out, arms).data
    assert sorted(p.name for p in tmp_path.glob("*page*")) == ["page.html"]


def test_text_cannot_leave_its_element() -> None:
    hostile = "</p><script>alert(1)</script><p title='\"'>"
    shown = tag("p", hostile, title=hostile)
    assert "<script" not in shown and shown.count("<") == 2 and shown.count(">") == 2
    assert shown.count('"') == 2  # those of the attribute


def test_markup_is_escaped_once() -> None:
    assert escape(escape("<")) == "&lt;"
    assert tag("b", tag("i", "&"), Html("<br>")) == "<b><i>&amp;</i><br></b>"


def test_what_cannot_be_seen_or_encoded_is_spelled_out() -> None:
    shown = escape("a\x00b\u202ec\ud800d\x1b[31m")
    assert shown == r"a\x00b\u202ec\ud800d\x1b[31m"
    shown.encode()
