"""A real headless Chromium, run folders, and pages from files and from the server. A page that logs an error, throws,
or asks for anything beyond its own address fails its test."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from page_runs import HOSTILE, WAIT_MS, write_run


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="make test-page installs Playwright"
    )
    path = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if path is None:
        pytest.skip("There is no Chromium here; on Debian it is the package chromium.")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[..., Any]]:
    """visit(address, **options of the context): a page, which is asked at the end whether anything went wrong."""
    wrong: list[str] = []
    with ExitStack() as stack:

        def open_page(address: str, **options: Any) -> Any:
            context = chromium.new_context(
                **({"viewport": {"width": 1280, "height": 900}} | options)
            )
            stack.callback(context.close)
            context.set_default_timeout(WAIT_MS)
            own = address.rpartition("/")[0] + "/"

            def route(route: Any) -> None:
                if route.request.url.startswith(own):
                    route.continue_()
                else:
                    wrong.append(f"asked for {route.request.url}")
                    route.abort()

            context.route("**/*", route)
            page = context.new_page()
            page.on(
                "console",
                lambda m: (
                    wrong.append(f"console: {m.text}") if m.type in ("error", "warning") else None
                ),
            )
            page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
            page.goto(address)
            return page

        yield open_page
        assert not wrong


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("runs")
    paces = {"uniform": 0.7, "speed": 1.5}
    return {
        "full": [write_run(root / "full")],
        "hostile": [write_run(root / "hostile", steps=6, groups=9, texts=HOSTILE)],
        "arms": [
            write_run(root / f"{arm}-s{s}", pace=pace, seed=s)
            for arm, pace in paces.items()
            for s in range(2)
        ],
    }


@pytest.fixture(scope="session")
def files(folders: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of the pages as files."""
    from whet.report.page import write_page

    root = tmp_path_factory.mktemp("pages")
    for name, runs in folders.items():
        write_page(
            root / f"{name}.html",
            runs,
            title=f"The {name} </title><script>document.title='owned'</script> page",
        )
    return {name: (root / f"{name}.html").as_uri() for name in folders}


@contextmanager
def served(runs: list[Path]) -> Iterator[str]:
    """The address of a live page."""
    from whet.report.data import PageData
    from whet.report.server import PageServer

    with PageServer(PageData(runs, title="live"), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    with ExitStack() as stack:
        yield lambda runs: stack.enter_context(served(runs))
