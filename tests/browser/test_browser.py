"""The page in a real browser: every plot draws, every control works, hostile text stays text, nothing leaves."""

from __future__ import annotations

import fcntl
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page_runs import HOSTILE, WAIT_MS, metrics_row, picture, rollouts, write_run
from small_run import SMALL

from whet.run import LOCK

Visit = Callable[..., Any]
EXPECTED = {
    *(
        "accuracy",
        "levels-held_out",
        "reward/mean",
        "curriculum/signal_share",
        "learn/entropy",
        "length",
        "any",
    ),
    *(
        "length/truncated",
        "learn/grad_norm",
        "learn/kl",
        "learn/mismatch",
        "flow",
        "pass_rates",
        "posterior",
    ),
    *(
        "allocation",
        "scores",
        "time",
        "time/gpu_idle",
        "rollout/tokens_per_s",
        "draft/saved_share",
        "draft/accept_length",
    ),
    *("arm", "draft-shares", "accept-position", "accept-rows", "running", "rollout/batch_mean"),
}
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True}
INK = """box => { // pixels of a chart that differ from its background
    const canvas = box.querySelector("canvas");
    if (!canvas) return 0;
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let inked = 0;
    for (let i = 3; i < data.length; i += 4) inked += data[i] > 0;
    return inked;
}"""


def drawn(page: Any) -> dict[str, int]:
    """Inked pixels by chart, after all charts that are shown came into view once."""
    found = {}
    page.locator("[data-chart]").first.wait_for()
    for box in page.locator("figure:visible [data-chart]").all():
        box.scroll_into_view_if_needed()
        box.locator("canvas").wait_for()
        found[box.get_attribute("data-chart")] = box.evaluate(INK)
    return found


def chart(page: Any, name: str) -> Any:
    return page.locator(f'[data-chart="{name}"]')


def texts(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(f"{selector} >> visible=true").all_inner_texts()]


def wait_for(page: Any, expression: str) -> None:
    """Asks again and again. Playwright's own wait would evaluate text inside the page, which its policy forbids."""
    end = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"It never came true: {expression}"
        page.wait_for_timeout(50)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_plot_of_a_file_draws(visit: Visit, files: dict[str, str], scheme: str) -> None:
    page = visit(files["full"], color_scheme=scheme)
    found = drawn(page)
    assert set(found) >= EXPECTED
    assert {name for name, ink in found.items() if ink < 300} == set()
    for box in page.locator("figure:visible [data-chart]").all():
        assert len(box.get_attribute("aria-label")) > 30  # the chart in words


def test_a_real_run_opens_from_a_file_and_from_the_server(
    visit: Visit, serve: Callable[..., str], tmp_path: Path
) -> None:
    sets = [
        word
        for entry in (*SMALL, "warm_start.0.steps=2", 'curriculum.starvation="relax"')
        for word in ("--set", entry)
    ]
    command = [
        sys.executable,
        "-m",
        "whet",
        "train",
        "chain",
        "--out",
        str(tmp_path / "run"),
        *sets,
    ]
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    for address in ((tmp_path / "run" / "report.html").as_uri(), serve([tmp_path / "run"])):
        page = visit(address)
        page.locator("#verdict").wait_for()
        found = drawn(page)
        assert {"accuracy", "reward/mean", "time", "learn/entropy"} <= set(found)
        assert min(found.values()) > 100
        page.locator("#rollouts").scroll_into_view_if_needed()
        page.locator(".list button.row").first.wait_for()
        assert "+" in page.locator(".rollout pre").first.inner_text()


def test_the_axis_is_switched_by_keyboard(visit: Visit, files: dict[str, str]) -> None:
    page = visit(files["full"])
    page.locator("[name=axis]").first.focus()
    for words in ("tokens generated", "time of training"):
        page.keyboard.press("ArrowRight")
        wait_for(
            page, f"document.querySelector('[data-chart=accuracy] .axis').textContent === {words!r}"
        )
    chart(page, "accuracy").focus()
    page.keyboard.press("End")
    assert (
        page.locator("figure", has=chart(page, "accuracy"))
        .locator("figcaption output")
        .inner_text()
        == "84\xa0s"
    )


def test_lines_can_be_hidden_and_smoothing_turned_off(visit: Visit, files: dict[str, str]) -> None:
    page = visit(files["full"])
    before = chart(page, "accuracy").evaluate(INK)
    name = page.locator("figure", has=chart(page, "accuracy")).locator(".legend button").first
    name.focus()
    page.keyboard.press("Enter")
    assert name.get_attribute("aria-pressed") == "false"
    assert chart(page, "accuracy").evaluate(INK) < before
    chart(page, "reward/mean").scroll_into_view_if_needed()
    chart(page, "reward/mean").locator("canvas").wait_for()
    faint = chart(page, "reward/mean").evaluate(INK)
    page.locator("#smooth").uncheck()
    assert chart(page, "reward/mean").evaluate(INK) != faint


def test_the_slider_moves_all_pictures(visit: Visit, files: dict[str, str]) -> None:
    page = visit(files["full"])
    slider = page.locator("#slider-rollout-flow")
    slider.scroll_into_view_if_needed()
    chart(page, "pass_rates").locator("canvas").wait_for()
    newest = chart(page, "pass_rates").evaluate("box => box.querySelector('canvas').toDataURL()")
    slider.focus()
    page.keyboard.press("Home")
    assert texts(page, ".steps output") == ["step 1"] * 3
    assert slider.get_attribute("aria-valuetext") == "step 1"
    assert (
        chart(page, "pass_rates").evaluate("box => box.querySelector('canvas').toDataURL()")
        != newest
    )
    page.keyboard.press("ArrowRight")
    assert texts(page, ".steps output") == ["step 2"] * 3
    page.keyboard.press("End")
    assert texts(page, ".steps output")[0] == "step 40, the newest"


@pytest.mark.parametrize(
    "options", [{}, {"viewport": {"width": 390, "height": 844}}], ids=["desktop", "phone"]
)
@pytest.mark.parametrize("name", ["full", "arms"])
def test_the_first_screen_is_one_sentence_and_the_accuracy(
    visit: Visit, files: dict[str, str], name: str, options: dict[str, Any]
) -> None:
    page = visit(files[name], **options)
    box = page.locator("[data-chart^=accuracy]").first
    box.locator("canvas").wait_for()
    bottom = box.evaluate("box => box.getBoundingClientRect().bottom")
    assert bottom <= page.viewport_size["height"], "the chart is seen without scrolling"
    (sentence,) = texts(page, "#top p")
    assert sentence.startswith("Learning: " if name == "full" else "speed is better than uniform: ")
    assert sentence.count(". ") == 0
    assert texts(page, "table") == [], "tables are folded"
    page.locator("#compare summary").first.click()
    assert "How the runs ended" in texts(page, "table caption")
    assert ("Runs" in texts(page, "table caption")) == (name == "arms")
    assert any("two evaluations in a row" in note for note in texts(page, "#compare .note"))


def test_only_sure_gains_have_a_colour_and_no_card_stands_alone(
    visit: Visit, files: dict[str, str]
) -> None:
    page = visit(files["arms"])
    drawn(page)
    data = json.loads(page.locator("#data").text_content())
    cells = [
        cell for each in data["compare"]["tables"][1:3] for row in each["rows"] for cell in row[1:]
    ]
    page.locator("#compare summary").first.click()
    assert (
        texts(page, "#compare td small.right")
        == [cell["ratio"] for cell in cells if cell["better"] > 0]
        != []
    )
    widths = page.evaluate(
        """() => [...document.querySelectorAll(".grid")].filter(grid => grid.offsetWidth).map(grid => {
            const rows = {};
            for (const card of grid.children)
                if (card.offsetWidth) rows[card.offsetTop] = (rows[card.offsetTop] || 0) + card.offsetWidth;
            return Object.values(rows).map(width => width / grid.offsetWidth);
        })"""
    )
    assert all(share > 0.9 for grid in widths for share in grid), widths


@pytest.mark.parametrize("way", ["file", "server"])
def test_texts_begin_with_one_rollout_of_each_prompt(
    visit: Visit,
    files: dict[str, str],
    folders: dict[str, Any],
    serve: Callable[..., str],
    way: str,
) -> None:
    page = visit(files["full"] if way == "file" else serve(folders["full"]))
    page.locator("#rollouts").scroll_into_view_if_needed()
    rows = page.locator(".list button.row")
    rows.first.wait_for()
    newest = [row for row in rows.all_inner_texts() if "step 40 " in row]
    assert len(newest) == 6 == len({row.split("step")[0] for row in newest}), (
        "six prompts, each once"
    )
    page.locator("[name=each]").uncheck()
    found = "[...document.querySelectorAll('.list button.row')].filter(r => r.innerText.includes('step 40 ')).length"
    wait_for(page, f"{found} === 24")


@pytest.mark.parametrize("way", ["file", "server"])
def test_rollouts_are_filtered_and_searched(
    visit: Visit,
    files: dict[str, str],
    folders: dict[str, Any],
    serve: Callable[..., str],
    way: str,
) -> None:
    page = visit(files["full"] if way == "file" else serve(folders["full"]))
    page.locator("#rollouts").scroll_into_view_if_needed()
    rows = page.locator(".list button.row")
    rows.first.wait_for()
    form = page.locator("form.filters")

    def settled(condition: str) -> None:
        wait_for(
            page,
            f"(() => {{ const rows = [...document.querySelectorAll('.list button.row')]; {condition} }})()",
        )

    form.locator("[name=step]").select_option("7")
    settled("return rows.length && rows.every(row => row.innerText.includes('step 7 '))")
    form.locator("[name=verdict]").select_option("right")
    settled("return rows.length && rows.every(row => row.querySelector('.mark.right'))")
    page.get_by_label("Next step").click()
    settled(
        "return rows.length && rows.every(row => row.innerText.includes('step 8 ') && row.querySelector('.mark.right'))"
    )
    page.get_by_role("button", name="Clear").click()
    form.locator("[name=level]").select_option("3")
    settled("return rows.length && rows.every(row => row.innerText.includes('level 3'))")
    form.locator("[name=phase]").select_option("screen")
    settled("return !rows.length")
    assert "No rollout matches" in page.locator("#found").inner_text()
    page.get_by_role("button", name="Clear").click()
    form.locator("[name=high]").fill("-0.4")
    settled("return rows.length && rows.every(row => row.innerText.includes('-0.5'))")
    page.get_by_role("button", name="Clear").click()
    form.locator("[name=q]").fill("NOWHERE to be found")
    settled("return !rows.length")
    form.locator("[name=q]").fill("FIRST, ")
    settled("return rows.length === 50")
    page.locator(".list .more button").click()
    settled("return rows.length > 50")


def test_rollouts_are_walked_by_keyboard_and_read_token_by_token(
    visit: Visit, files: dict[str, str]
) -> None:
    page = visit(files["full"])
    page.locator("#rollouts").scroll_into_view_if_needed()
    rows = page.locator(".list button.row")
    rows.first.wait_for()
    rows.first.focus()
    page.keyboard.press("ArrowDown")
    assert rows.nth(1).get_attribute("aria-current") == "true"
    page.keyboard.press("ArrowLeft")
    wait_for(page, "document.querySelector('.list button.row').innerText.includes('step 40 ')")
    for paint, shade in (("log_probs", "q"), ("entropies", "q"), ("drafted", "d")):
        page.locator("#paint").select_option(paint)
        page.locator(f".detail pre [class^={shade}]").first.wait_for()
        page.locator(f".detail .key [class^={shade}]").first.wait_for()
    page.locator(".detail pre span").nth(2).hover()
    assert "log-prob" in page.locator(".tip").inner_text()
    page.locator("[data-mode=group]").click()
    wait_for(page, "document.querySelectorAll('.beside .rollout').length === 4")
    page.locator("[data-mode=prompt]").click()
    wait_for(page, "document.querySelectorAll('.beside .rollout').length > 4")
    steps = [
        int(text.split("step ")[1].split()[0]) for text in texts(page, ".beside .rollout header")
    ]
    assert steps == sorted(steps)


@pytest.mark.parametrize("way", ["file", "server"])
def test_hostile_text_is_shown_as_text(
    visit: Visit,
    files: dict[str, str],
    folders: dict[str, Any],
    serve: Callable[..., str],
    way: str,
) -> None:
    page = visit(files["hostile"] if way == "file" else serve(folders["hostile"]))
    page.locator("#rollouts").scroll_into_view_if_needed()
    rows = page.locator(".list button.row")
    rows.first.wait_for()
    shown = ""
    for k in range(min(13, rows.count())):  # groups, since each prompt has one row
        rows.nth(k).click()
        page.locator("[data-mode=group]").click()
        page.locator(".beside .rollout").first.wait_for()
        shown += page.locator(".detail").inner_text()
    for text in (
        *HOSTILE[:4],
        "⟨U+202E⟩right to left",
        "⟨U+D800⟩",
        "⟨U+001B⟩[31mred",
        "⟨U+2028⟩separator",
    ):
        assert text in shown
    assert page.evaluate("document.title") != "owned"
    assert page.locator("main img, main script, main iframe, main a[href^=javascript]").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_several_runs_lie_over_each_other(visit: Visit, files: dict[str, str]) -> None:
    page = visit(files["arms"])
    found = drawn(page)
    assert "accuracy-held_out" in found
    assert min(found.values()) > 300
    legend = page.locator("figure", has=chart(page, "accuracy-held_out")).locator(".legend button")
    assert legend.count() == 2  # a line an arm; its seeds are the band
    assert " to " in legend.first.inner_text()
    page.locator("#run").select_option("2")
    assert "speed" in page.locator("figure", has=chart(page, "flow")).locator("h3").inner_text()
    assert page.locator("#compare table").count() >= 1


def test_menus_follow_the_run_and_a_prompt_is_found_by_its_name(
    visit: Visit, serve: Callable[..., str], tmp_path: Path
) -> None:
    early, late = (write_run(tmp_path / name, steps=3) for name in ("early", "late"))
    # as many steps as the other run has, but not the same ones
    for path in (late / "rollouts").iterdir():
        path.rename(path.with_name(path.name.replace("step_0000000", "step_0000001")))
    page = visit(serve([early, late]))
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.locator(".list button.row").first.wait_for()
    page.locator("#run").select_option("1")
    wait_for(
        page,
        "[...document.querySelectorAll('[name=step] option')].map(o => o.value).join() === ',11,12,13'",
    )
    # of prompts sum-0 to sum-5, each in three steps with four rollouts
    for name in ("q", "prompt"):
        page.locator(f"[name={name}]").fill("um-2")
        wait_for(page, "document.querySelectorAll('.list button.row').length === 12")


def test_values_of_a_live_run_arrive_and_filters_stay(
    visit: Visit, serve: Callable[..., str], tmp_path: Path
) -> None:
    run, rng = write_run(tmp_path / "run", steps=40, until=6), random.Random(5)
    with (run / LOCK).open("w") as lock:  # as a process does that trains
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = visit(serve([run]))
        wait_for(page, "document.querySelector('.state')?.textContent === 'going on'")
        page.locator("#rollouts").scroll_into_view_if_needed()
        page.locator(".list button.row").first.wait_for()
        page.locator("[name=q]").fill("plus")
        page.locator("[name=verdict]").select_option("wrong")
        page.locator("[name=axis]").nth(1).check(force=True)
        (run / "rollouts" / "step_00000007.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rollouts(7, 2, rng))
        )
        with (run / "pictures.jsonl").open("a") as file:
            file.write(json.dumps(picture(7, 40, rng)) + "\n")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics_row(7, 40, 1.0, rng)) + "\n")
        wait_for(
            page,
            "[...document.querySelectorAll('.facts div')].some(d => d.innerText.replace(/\\s+/g, ' ') === 'steps 7')",
        )
        wait_for(
            page, "[...document.querySelectorAll('[name=step] option')].some(o => o.value === '7')"
        )
        assert page.locator("[name=q]").input_value() == "plus"
        assert page.locator("[name=verdict]").input_value() == "wrong"
        assert page.locator("[name=axis]").nth(1).is_checked()
        assert texts(page, ".steps output")[0] == "step 7, the newest"


@pytest.mark.parametrize(
    "options", [{}, {"color_scheme": "dark"}, PHONE], ids=["light", "dark", "phone"]
)
@pytest.mark.parametrize("name", ["full", "arms"])
def test_axe_finds_nothing_serious_and_nothing_is_cut_off(
    visit: Visit, files: dict[str, str], name: str, options: dict[str, Any]
) -> None:
    import axe_playwright_python

    page = visit(files[name], **options)
    drawn(page)
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.locator(".list button.row").first.wait_for()
    page.evaluate((Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text())
    found = page.evaluate("axe.run()")["violations"]
    serious = [v for v in found if v["impact"] in ("serious", "critical")]
    assert not [
        (v["id"], v["nodes"][0]["html"][:200], v["nodes"][0]["failureSummary"]) for v in serious
    ]
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_a_run_that_has_hardly_begun_or_has_gaps(
    visit: Visit, serve: Callable[..., str], tmp_path: Path, rows: int
) -> None:
    """Nothing but the evaluation before the first step, or rows without numbers: the rest of the page is there."""
    run = write_run(tmp_path / "run", steps=4)
    lines = (run / "metrics.jsonl").read_text().splitlines()[:rows]
    gaps = [line.replace('"learn/entropy": ', '"learn/entropy": NaN, "x": ') for line in lines]
    (run / "metrics.jsonl").write_text("".join(line + "\n" for line in gaps) + '{"step": 5, "rewa')
    (run / "pictures.jsonl").unlink()
    for path in (run / "rollouts").iterdir():
        path.unlink()
    page = visit(serve([run]))
    page.get_by_text("saved no rollouts").wait_for()
    assert "NaN" not in page.locator("body").inner_text()
    if rows:
        assert min(drawn(page).values()) > 50


def test_the_first_tab_skips_to_the_charts(visit: Visit, files: dict[str, str]) -> None:
    page = visit(files["full"])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    wait_for(page, "document.activeElement.id === 'main'")


def test_without_javascript_the_numbers_are_there(visit: Visit, files: dict[str, str]) -> None:
    page = visit(files["full"], java_script_enabled=False)
    assert page.locator("noscript table").count() or page.locator("table").count()
    assert "held_out" in page.content()


@pytest.mark.slow
def test_a_thousand_steps_and_100_000_rollouts(
    visit: Visit, serve: Callable[..., str], tmp_path: Path
) -> None:
    from whet.report.page import write_page

    run = write_run(tmp_path / "run", steps=1_000, groups=25)
    write_page(tmp_path / "page.html", [run], title="large")
    assert (tmp_path / "page.html").stat().st_size < 15_000_000
    for address in ((tmp_path / "page.html").as_uri(), serve([run])):
        page = visit(address)
        assert set(drawn(page)) >= EXPECTED
        page.locator("#rollouts").scroll_into_view_if_needed()
        page.locator(".list button.row").first.wait_for()
