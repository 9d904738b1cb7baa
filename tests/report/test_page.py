from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from whet.report.page import write_page

VOID = {"meta"}
HOSTILE = [
    "<script>alert(1)</script>",
    "</style></pre></dd><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</title><svg/onload=alert(1)>",
    "nul\x00bell\x07escape\x1b[2J",
    "bidi\u202etxt.exe\u2066",
    "lone surrogate \ud83d",
    "&lt;b&gt; &#60;script&#62;",
    "<!-- <![CDATA[ -->",
    "x" * 100_000,
]


class Outline(HTMLParser):
    """Fails on a tag that does not close what is open; keeps tags, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def written(out: Path, folders: list[Path], **options: str) -> str:
    write_page(out, folders, **{"title": "Curricula side by side", **options})
    return out.read_text()


@pytest.fixture
def arms(make_run: Callable[..., Path]) -> list[Path]:
    return [
        make_run(f"{name}-seed{seed}", pace=pace, seed=seed, signal=signal)
        for name, pace, signal in (("uniform", 1.5, 0.2), ("dapo", 2.0, 0.4), ("speed", 3.0, 0.8))
        for seed in range(2)
    ]


def test_a_comparison_stands_alone_and_is_whole(arms: list[Path], tmp_path: Path) -> None:
    html = written(tmp_path / "page.html", arms, note="First paragraph.\n\nSecond one.")
    outline = Outline(html)
    assert "http" not in html and "<script" not in html and "@import" not in html and "url(" not in html
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(outline.tags)
    assert not {name for name in outline.attributes if name.startswith("on") or name in ("src", "href")}
    assert outline.tags.count("figure") == 3 and outline.tags.count("article") == 20
    for word in ("uniform", "dapo", "speed", "3 arms, 6 runs", "First paragraph.", "Second one.", "curriculum.groups"):
        assert word in outline.text
    assert "two consecutive evaluations" in outline.text and "960k" in outline.text


def test_a_single_run_adds_lengths_and_its_recipe(arms: list[Path], tmp_path: Path) -> None:
    outline = Outline(written(tmp_path / "report.html", arms[:1], title="One <run>"))
    for word in ("One <run>", "Response length", "p99", "Entropy", "generate", "learn.lr", "0.0002", "1 run"):
        assert word in outline.text
    assert "×" not in outline.text  # there is nothing to compare with


def test_the_time_budget_adds_up(arms: list[Path], tmp_path: Path) -> None:
    """60 steps of 0.2 s generating, 0.1 s training, 0.05 s else; 13 evaluations of 0.4 s: 26.2 s."""
    outline = Outline(written(tmp_path / "report.html", arms[:1]))
    assert "12s 46%" in outline.text and "6s 23%" in outline.text and "5.2s 20%" in outline.text
    two_seeds = Outline(written(tmp_path / "report.html", arms[:2]))
    assert "12s 46%" in two_seeds.text  # the mean, not the sum


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:20]))
def test_model_output_is_text_and_nothing_else(text: str, save_run: Callable[..., Path], tmp_path: Path) -> None:
    rollouts = [
        {"step": step, "prompt_id": text, "group_id": 0, "prompt": text, "response": text, "answer": text}
        | {"verdict": "right", "length": 3, "finish": text, "phase": text, "version": 1}
        for step in (0, 9)
    ]
    words = dict.fromkeys(("prompt", "response", "answer", "finish", "phase"), "calm")
    calm_run = save_run("calm", [{"step": 0}], [{**rollout, **words} for rollout in rollouts])
    calm = written(tmp_path / "calm.html", [calm_run])
    html = written(tmp_path / "hostile.html", [save_run("run", [{"step": 0}], rollouts)])
    assert Outline(html).tags == Outline(calm).tags
    assert Outline(html).attributes == Outline(calm).attributes
    assert len(html) < 60_000
    assert not {c for c in html if ord(c) < 32 and c != "\n"} and not set(html) & set("\u202e\u2066")


@pytest.mark.parametrize("text", HOSTILE[:6], ids=lambda text: repr(text[:20]))
def test_names_notes_and_settings_are_text_too(text: str, save_run: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{"step": i, "tokens_generated": i, "time_s": i, f"eval/{text}/accuracy": i / 9} for i in range(9)]
    a = save_run("a", rows, data=[{"path": text}])
    b = save_run("b", rows, data=[{"path": "plain"}])
    write_page(tmp_path / "page.html", {text: a, "b": b}, title=text, note=text)
    outline = Outline((tmp_path / "page.html").read_text())
    assert not {"script", "img"} & set(outline.tags) and not {"onerror", "onmouseover", "onload"} & outline.attributes


def test_a_run_that_has_just_begun_has_a_page(save_run: Callable[..., Path], tmp_path: Path) -> None:
    outline = Outline(written(tmp_path / "page.html", [save_run("new", [])]))
    assert "Nothing was recorded" in outline.text


def test_reports_load_no_torch() -> None:
    code = """import sys, whet.report.page, whet.report.compare, whet.report.view, whet.report.live
heavy = {"torch", "transformers", "matplotlib"} & set(sys.modules)
assert not heavy, heavy"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_is_replaced_whole(arms: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert written(out, arms[:1]) != written(out, arms)
    assert sorted(p.name for p in tmp_path.glob("*page*")) == ["page.html"]
