"""Serves the page of some runs live: `whet report RUN... --serve`. The browser asks for news and for rollouts.

    GET ./   assets/NAME   data[?after=CURSOR]
        rollouts?run=I&step=S&kind=&prompt=&group=&verdict=&phase=&level=&q=&each=

Nothing is written, and no path comes from a request: assets are named in a list, runs by their number. On loopback a
foreign Host is refused, so that no web page can reach the server under a name of its own (DNS rebinding). At another
address every path begins with a token that only the printed address holds. Answers forbid frames, foreign scripts and
the sending of that address to others.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from whet.adapters.serve import (
    QuietHandler,
    QuietServer,
    Refused,
    excerpt,
    is_loopback,
    is_own_host,
)
from whet.errors import WhetError
from whet.report.data import PageData
from whet.report.page import SCRIPTS, STYLES, asset, served_document
from whet.report.rollouts import Bookmark, to_json

MOST = 500  # rollouts in one answer
FILTERS = {
    "prompt": "prompt_id",
    "group": "group_id",
    "verdict": "verdict",
    "phase": "phase",
    "level": "level",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
HTML = "text/html; charset=utf-8"
JSON = "application/json"


class PageHandler(QuietHandler):
    timeout = 60
    server: PageServer

    def do_GET(self) -> None:
        try:
            kind, text = self.server.answer(self.path, self.headers.get_all("Host") or [])
            self._answer(200, kind, text)
        except WhetError as error:
            self._refuse(error.status if isinstance(error, Refused) else 400, str(error))

    do_HEAD = do_GET

    def _refuse(self, status: int, sentence: str) -> None:
        self._answer(status, JSON, to_json({"error": sentence}))

    def _answer(self, status: int, kind: str, text: str) -> None:
        allowed = {"Allow": "GET, HEAD"} if status == 405 else {}
        self.respond(status, text, HEADERS | {"Content-Type": kind} | allowed)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What `http.server` itself refuses; another method than GET among it, whose body is not read."""
        self.close_connection = True
        if code == 501:
            return self._refuse(405, "The page is only read: GET and HEAD are answered.")
        self._refuse(code, f"{excerpt(message or 'The request is not understood')}.")

    def version_string(self) -> str:
        return "whet"


class PageServer(QuietServer):
    def __init__(self, page: PageData, host: str, port: int) -> None:
        page.read(live=True)  # a folder that holds no run is refused before anything is served
        self.page, self.lock = page, threading.Lock()
        self.indexer = threading.Thread(target=self._index, daemon=True)
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(24)
        super().__init__(PageHandler, host, port)
        self.url += f"/{self.token}/" if self.token else "/"

    def answer(self, path: str, hosts: list[str]) -> tuple[str, str]:
        """The type and the text of an answer."""
        if not is_own_host(hosts, self.host, any_address=bool(self.token)):
            raise Refused(403, "This page is served under its own address only.")
        try:
            parts = urlsplit(path)
            pairs = parse_qsl(
                parts.query,
                keep_blank_values=True,
                strict_parsing=bool(parts.query),
                max_num_fields=20,
            )
        except ValueError:
            raise Refused(400, "The question is not understood.") from None
        way = unquote(parts.path).split("/")[1:]
        query = dict(pairs)
        if self.token and not hmac.compare_digest(
            (way.pop(0) if way else "").encode(), self.token.encode()
        ):
            raise Refused(
                403,
                "The token in the address is wrong or missing; take the address that whet printed.",
            )
        match way:
            case [""]:
                return HTML, served_document(self.page.title)
            case ["assets", name] if name in STYLES + SCRIPTS:
                return (
                    f"text/{'css' if name.endswith('.css') else 'javascript'}; charset=utf-8",
                    asset(name),
                )
            case ["data"]:
                with self.lock:
                    page = to_json(self.page.read(live=True, after=query.get("after", "")))
                    # once the first page is out, before a reader looks for a prompt
                    if not self.indexer.ident:
                        self.indexer.start()
                    return JSON, page
            case ["rollouts"]:
                return JSON, to_json(self._rollouts(query))
        raise Refused(404, "There is nothing at this address.")

    def _index(self) -> None:
        for shelf in self.page.shelves:
            for file in shelf.files():
                with self.lock:
                    shelf.index(file)

    def _rollouts(self, query: dict[str, str]) -> dict[str, Any]:
        def whole(name: str, default: int | None, most: int) -> int | None:
            text = query.get(name, "")
            if text and not (
                text.isascii() and text.isdigit() and len(text) < 19 and int(text) <= most
            ):
                raise Refused(400, f'{name} = "{text[:40]}" is no number from 0 to {most}.')
            return int(text) if text else default

        shelf = self.page.shelves[whole("run", 0, len(self.page.shelves) - 1) or 0]
        filters = {field: query[name] for name, field in FILTERS.items() if query.get(name)}
        after = Bookmark.read(query["after"]) if query.get("after") else None
        step = whole("step", None, 10**18)
        limit = whole("limit", 50, MOST) or 1
        # Evaluation numbers its groups from 0 each time, so a number alone is that of a training group.
        kind = query.get("kind") or ("step" if "group" in query else "")
        with self.lock:
            return shelf.find(
                filters=filters,
                step=step,
                kind=kind,
                text=query.get("q", ""),
                after=after,
                limit=limit,
                each=bool(query.get("each")),
            )
