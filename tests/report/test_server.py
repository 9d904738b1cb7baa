"""The served page over real sockets: what it answers, and what it refuses."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from run_folders import chain_rollouts, learning_rows, write_run

from whet.adapters.serve import CONNECTIONS
from whet.errors import WhetError
from whet.report.data import PageData
from whet.report.server import PageServer

Ask = Callable[..., tuple[HTTPResponse, bytes]]
Serve = Callable[..., PageServer]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    rows = learning_rows(2.0, 6, 16_000, 0.3, 0)
    return [
        write_run(tmp_path / name, rows, chain_rollouts((1, 6), seed))
        for seed, name in enumerate(("a", "b"))
    ]


@pytest.fixture
def serve(runs: list[Path]) -> Iterator[Serve]:
    servers: list[tuple[PageServer, threading.Thread]] = []

    def start(host: str = "127.0.0.1") -> PageServer:
        server = PageServer(PageData(runs, title="<b>two</b>"), host, 0)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(
    server: PageServer, path: str, method: str = "GET", host: str | None = None
) -> tuple[HTTPResponse, bytes]:
    address = str(server.server_address[0])
    link = HTTPConnection(
        "127.0.0.1" if address == "0.0.0.0" else address, server.server_port, timeout=60
    )
    try:
        link.putrequest(method, path, skip_host=True)
        link.putheader("Host", f"127.0.0.1:{server.server_port}" if host is None else host)
        link.endheaders()
        response = link.getresponse()
        return response, response.read()
    finally:
        link.close()


def data_of(server: PageServer, path: str) -> dict[str, Any]:
    response, body = ask(server, path)
    assert response.status == 200, body
    return json.loads(body)


def test_page_assets_data_and_rollouts_are_served(serve: Serve) -> None:
    server = serve()
    assert server.url == f"http://127.0.0.1:{server.server_port}/"
    response, body = ask(server, "/")
    assert response.status == 200 and b"&lt;b&gt;two" in body and b"<b>two" not in body
    assert (
        b'id="data"></script>' in body
        and b'src="assets/page.js"' in body
        and b"<script>" not in body
    )
    for name, kind in (
        ("page.js", "text/javascript"),
        ("page.css", "text/css"),
        ("uPlot.iife.min.js", "text/javascript"),
    ):
        response, body = ask(server, f"/assets/{name}")
        assert response.getheader("Content-Type", "").startswith(kind) and len(body) > 1000
    page = data_of(server, "/data")
    assert page["live"] and [run["name"] for run in page["runs"]] == ["a", "b"]
    assert page["runs"][0]["rollouts"] == {"total": 24, "steps": [1, 6], "rows": None}
    news = data_of(server, f"/data?after={page['cursor']}")
    assert [run["series"]["step"] for run in news["runs"]] == [[], []] and news["cursor"] == page[
        "cursor"
    ]


def test_rollouts_are_asked_for_by_run_filter_and_cursor(serve: Serve) -> None:
    server = serve()
    first = data_of(server, "/rollouts?run=1&limit=5")
    assert [row["step"] for row in first["rows"]] == [6] * 5 and first["next"]
    rest = data_of(server, f"/rollouts?run=1&limit=500&after={first['next']}")
    assert len(rest["rows"]) == 19 and rest["next"] is None
    right = data_of(server, "/rollouts?run=1&verdict=right&step=1&kind=step&q=%3D8*2&phase=&level=")
    assert right["rows"] and {(row["step"], row["verdict"]) for row in right["rows"]} == {
        (1, "right")
    }
    single = data_of(server, "/rollouts?run=1&step=6&each=1")["rows"]
    assert len(single) == 3 == len({row["prompt_id"] for row in single})
    row = first["rows"][0]
    group = data_of(
        server, f"/rollouts?run=1&step=6&group={row['group_id']}&prompt={row['prompt_id']}"
    )
    assert [r["index"] for r in group["rows"]] == [0, 1, 2, 3]


def test_news_come_while_a_run_goes_on(serve: Serve, runs: list[Path]) -> None:
    server = serve()
    cursor = data_of(server, "/data")["cursor"]
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "reward/mean": 0.5}\n{"step": 8, "rew')
    news = data_of(server, f"/data?after={cursor}")
    assert [run["series"]["step"] for run in news["runs"]] == [[7], []]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/..", 404),
        ("/../../etc/passwd", 404),
        ("/assets/../page.py", 404),
        ("/assets/%2e%2e/page.py", 404),
        ("/assets/page.html", 404),
        ("/assets/", 404),
        ("//etc/passwd", 404),
        ("/config.toml", 404),
        ("/data/", 404),
        ("/rollouts?run=2", 400),
        ("/rollouts?run=-1", 400),
        ("/rollouts?run=a/../b", 400),
        ("/rollouts?step=x", 400),
        ("/rollouts?step=%D9%A3", 400),
        ("/rollouts?limit=501", 400),
        ("/rollouts?after=..%2f..", 400),
        ("/rollouts?run", 400),
        ("http://[x/data", 400),
        ("/data?" + "&".join("a=1" for _ in range(50)), 400),
    ],
)
def test_nothing_else_is_there(serve: Serve, path: str, status: int) -> None:
    response, body = ask(serve(), path)
    assert response.status == status and json.loads(body)["error"].endswith(".")


def test_every_answer_has_its_guards(serve: Serve) -> None:
    server = serve()
    for path in ("/", "/assets/page.js", "/data", "/rollouts", "/nothing"):
        response, _ = ask(server, path)
        policy = response.getheader("Content-Security-Policy", "")
        assert (
            "default-src 'none'" in policy
            and "script-src 'self';" in policy
            and "frame-ancestors 'none'" in policy
        )
        assert (
            response.getheader("Cache-Control") == "no-store"
            and response.getheader("Referrer-Policy") == "no-referrer"
        )
        assert response.getheader("X-Content-Type-Options") == "nosniff"
        assert response.getheader("Access-Control-Allow-Origin") is None


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "ODD"]
)
def test_only_get_and_head_are_answered(serve: Serve, method: str) -> None:
    server = serve()
    response, body = ask(server, "/data", method)
    assert (
        response.status == 405 and response.getheader("Allow") == "GET, HEAD" and b"error" in body
    )
    response, body = ask(server, "/data", "HEAD")
    assert (
        response.status == 200
        and body == b""
        and int(response.getheader("Content-Length", "0")) > 1000
    )


def test_a_foreign_host_is_refused(serve: Serve) -> None:
    server = serve()
    for host in (
        "evil.example",
        "evil.example:8378",
        "127.0.0.1.evil.example",
        "",
        "192.168.1.5",
        "[::1",
        "localhost.evil",
    ):
        assert ask(server, "/data", host=host)[0].status == 403, host
    # a tunnel has a port of its own
    for host in ("localhost", "localhost:9000", "127.0.0.1", "[::1]:8378"):
        assert ask(server, "/data", host=host)[0].status == 200, host


def test_another_address_needs_the_token_in_the_path(serve: Serve) -> None:
    server = serve("0.0.0.0")
    token = server.url.rstrip("/").rsplit("/", 1)[1]
    assert len(token) >= 32 and serve("0.0.0.0").url.rstrip("/").rsplit("/", 1)[1] != token
    for path in (
        "/",
        "/data",
        "/assets/page.js",
        f"/{token[:-1]}/data",
        f"/{token}x/data",
        "//data",
    ):
        response, body = ask(server, path)
        assert response.status == 403 and b"token" in body and b"series" not in body
    assert (
        ask(server, f"/{token}/data")[0].status == 200
        and ask(server, f"/{token}/assets/page.js")[0].status == 200
    )
    assert ask(server, f"/{token}/data", host=f"10.1.2.3:{server.server_port}")[0].status == 200
    assert ask(server, f"/{token}/data", host="evil.example")[0].status == 403


def test_garbage_is_not_sent_back_whole(serve: Serve) -> None:
    server = serve()
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as link:
        link.sendall(b"garbage" * 5_000 + b" x\r\n\r\n")
        link.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: link.recv(2**16), b""))
    assert b"garbage" in answer and len(answer) < 1_000


def test_slow_connections_are_bounded_and_keep_nobody_out(serve: Serve) -> None:
    server = serve()
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(3 * CONNECTIONS):
            link = stack.enter_context(
                socket.create_connection(("127.0.0.1", server.server_port), timeout=60)
            )
            link.sendall(b"GET / HTTP/1.1\r\n")  # and never the rest
        assert ask(server, "/")[0].status == 200
        assert threading.active_count() <= before + CONNECTIONS


def test_hostile_rollouts_are_data(serve: Serve, runs: list[Path]) -> None:
    text = "</script><script>alert(1)</script>\u202e\ud83d\x1b[2J{{7*7}}"
    row = {
        "step": 9,
        "prompt_id": text,
        "response": text,
        "prompt": [{"role": text, "content": text}],
        "verdict": text,
    }
    (runs[0] / "rollouts" / "step_00000009.jsonl").write_text(json.dumps(row) + "\n")
    response, body = ask(serve(), "/rollouts?run=0&step=9")
    assert (
        response.getheader("Content-Type") == "application/json"
        and b"<" not in body
        and body.isascii()
    )
    (shown,) = json.loads(body)["rows"]
    assert (
        shown["response"] == text
        and shown["prompt"] == f"{text}: {text}"
        and shown["verdict"] == "unjudged"
    )


def test_a_line_that_breaks_while_it_is_served_is_left_out_in_one_sentence(
    serve: Serve, runs: list[Path]
) -> None:
    server = serve()
    (runs[0] / "metrics.jsonl").write_text('{"step": 0}\nnoise\n{"step": 1}\n')
    broken, whole = data_of(server, "/data")["runs"]
    assert broken["series"]["step"] == [0, 1] and len(whole["series"]["step"]) == 7
    assert (
        broken["note"] == "Line 2 of metrics.jsonl is damaged and left out." and not whole["note"]
    )


def test_a_recipe_that_is_lost_while_it_is_served_is_one_sentence(
    serve: Serve, runs: list[Path]
) -> None:
    server = serve()
    (runs[0] / "config.toml").unlink()
    (runs[0] / "metrics.jsonl").write_text('{"step": 0}\n')
    response, body = ask(server, "/data")
    assert response.status == 400 and "holds no config.toml" in json.loads(body)["error"]


def test_a_port_in_use_and_a_folder_without_a_run_are_one_sentence(
    runs: list[Path], tmp_path: Path
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(WhetError, match="cannot be opened"):
            PageServer(PageData(runs, title=""), "127.0.0.1", other.getsockname()[1])
    (tmp_path / "empty").mkdir()
    with pytest.raises(WhetError, match=r"holds no config\.toml"):
        PageServer(PageData([tmp_path / "empty"], title=""), "127.0.0.1", 0)
