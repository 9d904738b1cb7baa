"""A curriculum as a small HTTP server, for a trainer in any process or language: `whet curriculum serve RECIPE`.

    STATE/state.json   calls.jsonl   lock

A call is answered once it is in calls.jsonl; the curriculum itself is written to state.json only when that file has
grown. A server that was killed loads state.json and makes the later calls again: the same calls give the same plans
(line 1 of the contract). The answer of the last call is kept, so one that is sent again counts once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from whet import config, files
from whet.adapters.client import CALLS, LIMIT, QUESTIONS, SECONDS, perform
from whet.curriculum.base import Curriculum
from whet.curriculum.build import build_curriculum
from whet.errors import Starved, WhetError
from whet.problems import anchor_paths, load_problems
from whet.recipe import dump_config
from whet.types import Sampling

JOURNAL = 4 * 2**20  # bytes of calls.jsonl after which the state is written
CONNECTIONS = 64  # open at once, each with a thread; a browser keeps at most six
PATIENCE = 1.0  # seconds that a new connection waits for a place
QUOTED = 100  # characters of a request that an error repeats

# The smallest and largest value of each number of a clock. A plan takes time and memory in proportion to `groups`.
CLOCK = {
    "step": (0, 2**53),
    "version": (0, 2**53),
    "groups": (1, 65_536),
    "free": (0, 2**24),
    "tokens": (0, 2**53),
    "progress": (0, 1),
}


class Refused(WhetError):
    """A request that is not carried out; `status` is HTTP's number for the reason."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Service:
    """A curriculum, the number of its last call, and the folder in which both outlive the process."""

    last: tuple[str, int, Any]  # digest, status and answer of the last call

    def __init__(
        self, make: Callable[[], Curriculum], folder: Path, *, recipe: str = "", prompts: Any = None
    ):
        """make: builds the curriculum anew; recipe: what it is built by; prompts: those of training, by id."""
        self.make, self.recipe, self.prompts = make, recipe, prompts or {}
        self.state, self.calls, self.lock = (
            folder / "state.json",
            folder / "calls.jsonl",
            threading.Lock(),
        )
        files.make_folder(folder)
        self._held = (folder / "lock").open("w")
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._held.close()
            raise WhetError(
                f"Another process serves from {folder}; stop it, or give another --state."
            ) from None
        try:
            self.restore()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._held.close()

    def answer(self, name: str, body: bytes) -> tuple[int, Any]:
        """The HTTP status and the answer to a call or a question."""
        try:
            args = json.loads(body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"The body is not JSON ({error}).") from None
        if not isinstance(args, dict):
            raise Refused(400, "The body is not a JSON object.")
        # These two read nothing that a call changes, so they do not wait for a long one.
        if name == "hello":
            return 200, {"answer": self._greeting}
        if name == "prompts":
            return 200, {"answer": self._find_prompts(args)}
        with self.lock:
            if name in CALLS:
                return self._call(name, args, body)
            return 200, {"answer": self._ask(name)}

    def _find_prompts(self, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        try:
            return [asdict(self.prompts[prompt_id]) for prompt_id in args["ids"]]
        except (KeyError, TypeError) as error:
            raise Refused(
                400, f"There is no training prompt {error}, or no list of ids was given."
            ) from None

    def _greet(self) -> None:
        """Write down what `hello` answers: the state after the last whole call."""
        needs = sorted(self.curriculum.needs)
        self._greeting = {"number": self.number, "needs": needs, "prompts": len(self.prompts)}

    def _ask(self, name: str) -> Any:
        found = getattr(self.curriculum, name)()
        return sorted(found) if isinstance(found, set) else found

    def _call(self, name: str, args: Mapping[str, Any], body: bytes) -> tuple[int, Any]:
        number = args.get("number")
        digest = hashlib.sha256(name.encode() + b"\n" + body).hexdigest()
        if number == self.number and digest == self.last[0]:
            return self.last[1], self.last[2]
        if number != self.number + 1:
            rest = f"the next one is {self.number + 1}; one trainer alone may drive a curriculum"
            raise Refused(409, f"The call {name} has the number {excerpt(number)}, but {rest}.")
        check_clock(args.get("clock"))
        try:
            self._apply(name, args, digest)
            # A body may have line ends, or be UTF-16: only what is plainly one line is kept as it came.
            sent = (
                body.decode()
                if body.isascii() and body.decode().isprintable()
                else json.dumps(args)
            )
            line = f'{{"call": "{name}", "digest": "{digest}", "args": {sent}}}'
            files.append_line(self.calls, line)
        except Exception as error:
            self.restore()  # it may have been half done
            if isinstance(error, WhetError):
                raise
            raise Refused(
                400, f"The call {name} does not fit ({type(error).__name__}: {error})."
            ) from error
        self._greet()
        self.written += len(line)
        if self.written > JOURNAL:
            self.save()
        return self.last[1], self.last[2]

    def _apply(self, name: str, args: Mapping[str, Any], digest: str) -> None:
        try:
            status, answer = 200, {"answer": perform(self.curriculum, name, args)}
        except Starved as error:  # an outcome like any other: the trainer must hear of it
            status, answer = 409, {"error": str(error), "starved": True}
        self.number = args["number"]
        self.last = (digest, status, answer)

    def save(self) -> None:
        """Write the state; calls before it are no longer needed."""
        state = {"recipe": self.recipe, "number": self.number, "last": self.last}
        files.write_text(
            self.state, json.dumps({**state, "curriculum": self.curriculum.state_dict()})
        )
        files.write_bytes(self.calls, b"")
        self.written = 0

    def restore(self) -> None:
        """Build the curriculum anew, load its state and make the calls since then again."""
        self.curriculum = self.make()
        self.number = 0
        self.written = 0
        self.last = ("", 200, {})
        if not self.state.exists():
            self.save()
        try:
            state = json.loads(self.state.read_bytes())
            recipe, inner = state["recipe"], state["curriculum"]
            self.number, self.last = state["number"], tuple(state["last"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise WhetError(
                f"{self.state} cannot be read ({type(error).__name__}); give another --state."
            ) from None
        if recipe != self.recipe:
            raise WhetError(
                f"{self.state} was written with another recipe; serve that one, or give another --state."
            )
        self.curriculum.load_state_dict(inner)
        lines = self.calls.read_bytes() if self.calls.exists() else b""
        whole = lines[: lines.rfind(b"\n") + 1]
        if whole != lines:  # a kill tore the last line: it was never answered
            files.write_bytes(self.calls, whole)
        for line in whole.splitlines():
            made = json.loads(line)
            if made["args"]["number"] > self.number:
                self._apply(made["call"], made["args"], made["digest"])
        self.written = len(whole)
        self._greet()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def check_clock(clock: Any) -> None:
    """Refuse a clock with a number that no trainer has; what is missing or unknown is refused later."""
    if not isinstance(clock, dict):
        return
    for name, (low, high) in CLOCK.items():
        value = clock.get(name, low)
        if name == "free" and value is None:
            continue
        kinds, kind = (
            ((int,), "a whole number") if name != "progress" else ((int, float), "a number")
        )
        if type(value) not in kinds or not low <= value <= high:
            bounds = f"it must be {kind} from {low:,} to {high:,}"
            raise Refused(400, f"The clock has {name} = {excerpt(value)}, but {bounds}.")


def excerpt(value: Any) -> str:
    """The beginning of a value that came with a request: an error need not send back all of it."""
    text = str(value)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}..."


# ---- HTTP


class QuietHandler(BaseHTTPRequestHandler):
    """Sends each answer in one piece, on a connection that stays open, and keeps no log."""

    protocol_version = "HTTP/1.1"
    timeout = SECONDS
    disable_nagle_algorithm = True
    wbufsize = -1

    def respond(self, status: int, text: str, headers: Mapping[str, str]) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Handler(QuietHandler):
    server: CurriculumServer

    def do_POST(self) -> None:
        try:
            status, answer = self.server.service.answer(*self._read())
        except Refused as error:
            status, answer = error.status, {"error": str(error)}
        except WhetError as error:
            status, answer = 400, {"error": str(error)}
        self._answer(status, answer)

    def _read(self) -> tuple[str, bytes]:
        """Check a request before its body is read, and read it within its time."""
        # unless the body is read whole
        self.close_connection, until = True, time.monotonic() + SECONDS
        self._refuse_strangers()
        name = self.path.strip("/")
        if name not in CALLS + QUESTIONS:
            raise Refused(
                404, f'There is no call "{name[:40]}"; there are {", ".join(CALLS + QUESTIONS)}.'
            )
        # so that no web page can send one unasked
        if self.headers.get_content_type() != "application/json":
            raise Refused(415, "The body must have the Content-Type application/json.")
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            raise Refused(411, "The request needs a Content-Length.")
        if int(length) > LIMIT:
            raise Refused(413, f"The body has {int(length):,} bytes; at most {LIMIT:,} are taken.")
        body = bytearray()
        while len(body) < int(length):
            self.connection.settimeout(max(0.01, until - time.monotonic()))
            try:
                piece = self.rfile.read1(int(length) - len(body))
            except TimeoutError:
                raise Refused(408, f"The body did not come within {SECONDS:.0f} seconds.") from None
            if not piece:
                raise Refused(400, "The body is shorter than its Content-Length.")
            body += piece
        self.connection.settimeout(SECONDS)
        self.close_connection = self.headers.get("Connection", "").lower() == "close"
        return name, bytes(body)

    def _refuse_strangers(self) -> None:
        """A token keeps out everyone who lacks it. Without one, a web page in a browser of this machine is kept out."""
        token = self.server.token
        if token:
            given = self.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                raise Refused(
                    401,
                    "The token is wrong or missing; give the one with which the server was started.",
                )
        elif not is_own_host(self.headers.get_all("Host") or [], self.server.host):
            raise Refused(403, "The curriculum is served under its own address only.")
        if self.headers.get("Origin") is not None:
            raise Refused(403, "The curriculum answers trainers, not web pages.")

    def _answer(self, status: int, answer: Any) -> None:
        self.respond(status, json.dumps(answer), {"Content-Type": "application/json"})
        self.wfile.flush()
        if self.close_connection:
            self._drain()

    def _drain(self) -> None:
        """Read what is still sent for a moment: closing at once would take the answer from a sender in mid-body."""
        until = time.monotonic() + SECONDS
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(2.0)
            while time.monotonic() < until and self.connection.recv(2**20):
                pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What `http.server` itself refuses, such as another method, as JSON, too."""
        self.close_connection = True
        words = excerpt(message or "The request is not understood")
        self._answer(code, {"error": f"{words}; calls are sent by POST."})


class QuietServer(ThreadingHTTPServer):
    """An HTTP server at an address of this machine, without look-ups of names and without a log.

    It holds at most CONNECTIONS at once. One more ends the oldest, so that slow ones cannot keep a new one out.
    """

    daemon_threads = True
    request_queue_size = 4 * CONNECTIONS  # beyond it a client asks again only after seconds

    def __init__(self, handler: type[BaseHTTPRequestHandler], host: str, port: int) -> None:
        self.host = host
        self._places = threading.BoundedSemaphore(CONNECTIONS)
        self._open: dict[int, socket.socket] = {}  # by id, the oldest first
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), handler)
        except (OSError, OverflowError) as error:
            cure = "choose another --port or --host (--port 0 takes a free one)"
            raise WhetError(f"Port {port} of {host} cannot be opened ({error}); {cure}.") from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.server_address[1]}"

    def server_bind(self) -> None:
        """Bind without the look-up of a host name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = (
            str(self.server_address[0]),
            int(self.server_address[1]),
        )

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self._end_oldest()
            if not self._places.acquire(timeout=PATIENCE):  # all are at work: the client asks again
                self.shutdown_request(request)
                return
        self._open[id(request)] = request
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.pop(id(request), None)
            self._places.release()

    def _end_oldest(self) -> None:
        oldest = next(iter(list(self._open.values())), None)
        if oldest is not None:
            with contextlib.suppress(OSError):  # it may have ended by itself
                oldest.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is the client's affair: it asks again."""


class CurriculumServer(QuietServer):
    def __init__(self, service: Service, host: str = "127.0.0.1", port: int = 0, token: str = ""):
        self.service = service
        self.token = token
        if not token and not is_loopback(host):
            raise WhetError(f"--host {host} lets other machines in, so it needs a --token.")
        super().__init__(Handler, host, port)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_own_host(hosts: list[str], own: str, *, any_address: bool = False) -> bool:
    """Whether the Host headers of a request name the server at `own`: there is one, and it is `own`, localhost or a
    loopback address, or with `any_address` this machine's name or any address. The port may be that of a tunnel.

    A web page whose name was bound to this machine (DNS rebinding) sends a name of its own.
    """
    if len(hosts) != 1:
        return False
    try:
        name = urlsplit(f"//{hosts[0]}").hostname or ""
        if name in ("localhost", own.lower()) or (
            any_address and name == socket.gethostname().lower()
        ):
            return True
        return ipaddress.ip_address(name).is_loopback or any_address
    except ValueError:
        return False


def open_service(settings: config.Config, folder: Path) -> Service:
    """The curriculum of a recipe over its training prompts. It judges nothing, so no judge is loaded."""
    if not settings.data:
        raise WhetError(
            "There is nothing to train on: name the problems by [[data]] in the recipe."
        )
    settings = anchor_paths(settings)
    problems = load_problems(settings, lambda prompt, response: 0.0)
    how = settings.rollout
    facts = problems.facts()
    sampling = Sampling(
        max_tokens=how.max_tokens, temperature=how.temperature, stop_strings=how.stop_strings
    )

    def make() -> Curriculum:
        return build_curriculum(
            settings.curriculum, facts=facts, sampling=sampling, seed=settings.seed
        )

    return Service(make, folder, recipe=dump_config(settings), prompts=problems.train)
