"""Remakes the pictures of README and docs: a command in the terminal, and the page that it wrote. `make pictures`.

asciinema records the command in a pseudo-terminal. Waits are cut, what is still longer than 90 seconds runs faster, and
termtosvg draws it as an animated SVG. Debian's Chromium, driven by Playwright, takes the screenshots.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

COLUMNS, ROWS = 100, 30
SECONDS = 90.0  # of the recording, the last picture included
IDLE = 2.0  # the longest wait that is shown
FRAME = 0.5  # output closer together than this becomes one picture
HOLD = 6.0  # how long the last picture stays
MOST_BYTES = 1_500_000
# name: width, height, colour scheme, is it a phone, the part of the page to show ("" is its top)
SHOTS = {
    "page-light": (1280, 1200, "light", False, ""),
    "page-dark": (1280, 900, "dark", False, "#learning"),
    "page-rollouts": (1280, 900, "light", False, "#rollouts"),
    "page-phone": (390, 844, "light", True, "#learning"),
}
Event = tuple[float, str]
ERASED = re.compile(r"\r\x1b\[2K(\x1b\[1A\x1b\[2K)*")
SAME_STYLE = re.compile(r"(\x1b\[[\d;]+m)([^\x1b]*)\x1b\[0m\1")


def record(command: list[str], folder: Path, cast: Path) -> None:
    """Run the command in the folder as a reader would, with its line above what it prints."""
    line = shlex.join(command)
    shown = f"printf '\\033[32m$\\033[0m %s\\n' {shlex.quote(line)}; exec {line}"
    size = ["--cols", str(COLUMNS), "--rows", str(ROWS)]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {"DISPLAY", "WAYLAND_DISPLAY"}
    }
    environment |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    recorder = [
        sys.executable,
        "-m",
        "asciinema",
        "rec",
        "--quiet",
        "--overwrite",
        *size,
        "-c",
        shown,
        str(cast),
    ]
    subprocess.run(recorder, check=True, cwd=folder, env=environment, stdin=subprocess.DEVNULL)


def erased(text: str) -> int:
    """The lines that a live display erases before it draws them anew. Of two drawings that erase as many, the second
    leaves nothing of the first."""
    found = ERASED.match(text)
    return found.group().count("\x1b[2K") if found else 0


def fit(events: Iterable[Event]) -> list[Event]:
    """The same output in at most SECONDS: waits are cut to IDLE, then all runs faster by one factor.

    >>> fit([(10.0, "a"), (10.1, "b"), (99.0, "c")])
    [(0.0, 'ab'), (2.1, 'c')]
    >>> fit((2.0 * n, str(n)) for n in range(85))[-1]
    (84.0, '84')
    >>> fit([(0.0, "\\r\\x1b[2K1%"), (0.1, "\\r\\x1b[2K2%"), (0.2, "done")])
    [(0.0, '\\r\\x1b[2K2%done')]
    """
    cut: list[Event] = []
    now = before = None
    for at, text in events:
        now = 0.0 if now is None or before is None else now + min(at - before, IDLE)
        before = at
        cut.append((now, text))
    factor = min(1.0, (SECONDS - HOLD) / max(cut[-1][0], 1e-9))
    frames: list[tuple[float, list[str]]] = []
    for at, text in cut:
        if not frames or at * factor - frames[-1][0] >= FRAME:
            frames.append((round(at * factor, 3), []))
        shown = frames[-1][1]
        if shown and erased(text) and erased(text) == erased(shown[-1]):
            shown.pop()
        shown.append(text)
    return [(at, plainer("".join(texts))) for at, texts in frames]


def plainer(text: str) -> str:
    """Without a style that ends and begins anew at once.

    >>> plainer("\\x1b[2ma\\x1b[0m\\x1b[2mb\\x1b[0m")
    '\\x1b[2mab\\x1b[0m'
    """
    while (shorter := SAME_STYLE.sub(r"\1\2", text)) != text:
        text = shorter
    return text


def cut_cast(cast: Path) -> None:
    head, *lines = cast.read_text().splitlines()
    written = [(at, text) for at, kind, text in map(json.loads, lines) if kind == "o"]
    events = fit(written)
    print(
        f"{written[-1][0]:.0f} s of output are shown in {events[-1][0]:.0f} s, {len(events)} pictures"
    )
    rows = [head, *(json.dumps([at, "o", text], ensure_ascii=False) for at, text in events)]
    cast.write_text("\n".join(rows) + "\n")


def draw(cast: Path, svg: Path) -> None:
    look = ["-t", "window_frame", "-D", str(int(1000 * HOLD))]
    subprocess.run(
        [sys.executable, "-m", "termtosvg", "render", str(cast), str(svg), *look], check=True
    )


def photograph(page: Path, folder: Path) -> None:
    """Screenshots of the page from its file; an error of its script, or a request to another place, ends it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        browser = tools.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, (width, height, scheme, phone, part) in SHOTS.items():
            wrong: list[str] = []
            context = browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme="dark" if scheme == "dark" else "light",
                is_mobile=phone,
                device_scale_factor=2 if phone else 1,
            )
            tab = context.new_page()
            tab.on("pageerror", lambda error, wrong=wrong: wrong.append(str(error)))
            tab.on(
                "request",
                lambda asked, wrong=wrong: asked.url.startswith("http") and wrong.append(asked.url),
            )
            tab.goto(page.absolute().as_uri())
            tab.wait_for_load_state("networkidle")
            for _ in range(2 if part else 0):  # again, since what is drawn on the way may move it
                tab.locator(part).evaluate("part => part.scrollIntoView()")
                tab.wait_for_timeout(1000)
            tab.wait_for_timeout(500)  # charts are drawn when they come into view
            tab.screenshot(path=folder / f"{name}.png", animations="disabled")
            context.close()
            assert not wrong, wrong
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    parser.add_argument(
        "--folder",
        type=Path,
        help="Where the command runs; by default a folder that is then removed.",
    )
    parser.add_argument(
        "--page", default="runs/demo/report.html", help="What the command writes there."
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="Take the recording and the page in --folder as they are.",
    )
    parser.add_argument("command", nargs="*", default=["whet", "demo"])
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    cast = asked.out.absolute() / "demo.cast"
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        if not asked.keep:
            record(asked.command, folder, cast)
            cut_cast(cast)
        draw(cast, cast.with_suffix(".svg"))
        photograph(folder / asked.page, asked.out)
    sizes = {path.name: path.stat().st_size for path in sorted(asked.out.iterdir())}
    print(*(f"{name}: {size / 1000:.0f} kB" for name, size in sizes.items()), sep="\n")
    if sum(sizes.values()) > MOST_BYTES:
        sys.exit(f"The pictures take {sum(sizes.values()):,} bytes, more than {MOST_BYTES:,}.")


if __name__ == "__main__":
    main()
