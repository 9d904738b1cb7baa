"""The contract holds through HTTP, also where the server is killed; a call sent again counts once; bad input is refused
with one sentence and changes nothing."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from worlds import SAMPLING, build

from whet.adapters.client import RemoteCurriculum
from whet.adapters.desk import Desk, Finished
from whet.adapters.serve import CONNECTIONS, CurriculumServer, Service
from whet.curriculum.base import Curriculum
from whet.errors import Starved, WhetError
from whet.testing.contract import Make, check_contract, check_world, play
from whet.testing.simulator import World
from whet.types import Clock, Report, fields_of

CLOCK = Clock(step=0, version=0, groups=2, free=None, tokens=0, progress=0.0)


class Servers(ExitStack):
    """Servers in threads of this process, each over a curriculum and a folder of its own."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder, self.count = folder, 0

    def start(
        self, make: Any, *, folder: Path | None = None, token: str = "", **given: Any
    ) -> CurriculumServer:
        self.count += 1
        service = Service(make, folder or self.folder / str(self.count), **given)
        server = CurriculumServer(service, token=token)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        for end in (service.close, server.server_close, thread.join, server.shutdown):
            self.callback(end)
        return server

    def remote(self, make: Make) -> Make:
        """`make` for the contract suite, with a new server for each curriculum. A run that is saved and loaded needs
        the last two, so the others are stopped."""
        running: deque[Servers] = deque()

        def made(ids: Sequence[str], seed: int) -> RemoteCurriculum:
            if len(running) > 1:
                running.popleft().close()
            self.count += 1
            own = self.enter_context(Servers(self.folder / str(self.count)))
            running.append(own)
            remote = RemoteCurriculum(own.start(lambda: make(ids, seed)).url)
            own.callback(remote.close)
            return remote

        return made


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with Servers(tmp_path) as stack:
        yield stack


@pytest.mark.parametrize("name", ["uniform", "speed"])
def test_a_world_of_the_contract_through_http(servers: Servers, name: str) -> None:
    make = servers.remote(lambda ids, seed: build(name, ids, seed))
    world = World(slots=12, updates=3, seed=2)
    assert check_world(make, world, save_share=0.05, max_age=1, rollouts=5) == 3


@pytest.mark.slow
def test_the_whole_contract_holds_through_http(servers: Servers) -> None:
    check_contract(
        servers.remote(lambda ids, seed: build("speed", ids, seed)),
        max_age=1,
        rollouts=5,
        patience=50,
    )


def test_a_remote_curriculum_plays_as_the_local_one(servers: Servers) -> None:
    for name in ("cures", "all", "stages"):
        world = World(slots=12, updates=4, seed=2)
        local = play(lambda ids, seed: build(name, ids, seed), world, epochs=False)  # noqa: B023
        remote = play(servers.remote(lambda ids, seed: build(name, ids, seed)), world, epochs=False)  # noqa: B023
        assert remote.log == local.log


def test_signals_travel(servers: Servers) -> None:
    def make(ids: Sequence[str], seed: int) -> Curriculum:
        return build("cures", ids, seed, cures={"sigma": "gradient"})

    world = World(updates=4)
    assert make(world.ids, 0).needs == {"score"}
    local, remote = play(make, world, epochs=False), play(servers.remote(make), world, epochs=False)
    assert remote.curriculum.needs == {"score"} and remote.log == local.log
    assert remote.log[-1][1]["curriculum/score_right"] > 0


def test_a_desk_stands_over_a_remote_curriculum(servers: Servers) -> None:
    desk = Desk(
        servers.remote(lambda ids, seed: build("speed", ids, seed))(World().ids, 0), groups=1
    )
    count = 0
    while desk.take() is None:
        orders = [desk.begin(f"{count + i}") for i in range(desk.wanted())]
        count += len(orders)
        while orders:
            order = orders.pop()
            done = [
                Finished(uid=order.uid, index=i, length=3, verdict=("right", "wrong")[i % 2])
                for i in order.indices
            ]
            orders += [answer.order for answer in desk.report(done).values() if answer.order]
    assert desk.batch is not None and len(desk.batch.groups[0].rollouts) == 5


# ---- numbers


def post(
    url: str, name: str, args: Any, headers: Any = None, method: str = "POST"
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    body = args if isinstance(args, bytes) else json.dumps(args).encode()
    connection.request(
        method, f"/{name}", body, {"Content-Type": "application/json", **(headers or {})}
    )
    response = connection.getresponse()
    status, data = response.status, json.loads(response.read())
    connection.close()
    return status, data


def plan_args(number: int) -> dict[str, Any]:
    return {"number": number, "clock": {n: getattr(CLOCK, n) for n in Clock.__slots__}}


def clocked(**values: Any) -> dict[str, Any]:
    """The arguments of the second call, with these values in its clock."""
    args = plan_args(2)
    return {**args, "clock": {**args["clock"], **values}}


def test_a_call_sent_again_counts_once(servers: Servers, tmp_path: Path) -> None:
    server = servers.start(lambda: build("uniform", World().ids, 0))
    first = post(server.url, "plan", plan_args(1))
    assert first[0] == 200 and len(first[1]["answer"]) == 2
    state = post(server.url, "state_dict", {})
    assert post(server.url, "plan", plan_args(1)) == first
    assert post(server.url, "state_dict", {}) == state
    status, data = post(server.url, "plan", {**plan_args(1), "client": "another"})
    assert status == 409 and "has the number 1, but the next one is 2" in data["error"]
    assert post(server.url, "plan", plan_args(7))[0] == 409
    assert post(server.url, "hello", {})[1]["answer"] == {"number": 1, "needs": [], "prompts": 0}


def test_a_server_goes_on_from_its_folder(tmp_path: Path) -> None:
    def make() -> Curriculum:
        return build("speed", World().ids, 0)

    folder = tmp_path / "state"
    with Servers(tmp_path) as servers:
        url = servers.start(make, folder=folder).url
        first = post(url, "plan", plan_args(1))
        state = post(url, "state_dict", {})
        with pytest.raises(WhetError, match="Another process serves from"):
            Service(make, folder)
    with (folder / "calls.jsonl").open("ab") as file:
        file.write(b'{"call": "plan", "dig')  # a kill in the middle of a write
    with Servers(tmp_path) as servers:
        url = servers.start(make, folder=folder).url
        assert post(url, "state_dict", {}) == state and post(url, "plan", plan_args(1)) == first
        assert post(url, "plan", plan_args(2))[0] == 200
    with Servers(tmp_path) as servers:
        service = servers.start(make, folder=folder).service
        before = service.curriculum.state_dict()
        service.save()
        assert service.number == 2 and (folder / "calls.jsonl").read_bytes() == b""
        service.restore()
        assert service.number == 2 and service.curriculum.state_dict() == before
    with pytest.raises(WhetError, match="another recipe"):
        Service(make, folder, recipe="other")
    for broken in ("{", "[]", '{"recipe": "", "number": 2, "last": ["", 200, {}]}'):
        (folder / "state.json").write_text(broken)
        with pytest.raises(WhetError, match="cannot be read"):
            Service(make, folder)


def test_starvation_travels_and_counts_as_a_call(servers: Servers) -> None:
    world = World(pass_rates=(0.0,), updates=1)
    remote = play(servers.remote(lambda ids, seed: build("dapo", ids, seed, patience=2)), world)
    assert remote.log[-1] == ("starved", 0)
    with pytest.raises(Starved, match="none found useful, 4 are needed"):
        remote.curriculum.emit(
            Clock(step=0, version=0, groups=4, free=None, tokens=0, progress=0.0)
        )
    remote.curriculum.metrics()


# ---- bad input


def test_bad_requests_get_one_sentence_and_change_nothing(servers: Servers) -> None:
    server = servers.start(lambda: build("uniform", World().ids, 0), token="secret")
    good = {"Authorization": "Bearer secret"}
    status, planned = post(server.url, "plan", plan_args(1), good)
    assert status == 200
    state = post(server.url, "state_dict", {}, good)
    deep = b"[" * 100_000
    rollout = {
        "prompt_id": "p0",
        "group_id": 99,
        "index": 0,
        "phase": "train",
        "length": 3,
        "finish": "stop",
    }
    rollout |= {
        "first_version": 0,
        "last_version": 0,
        "sampling": {"max_tokens": 3, "stop_ids": [], "stop_strings": []},
    }
    asked = rollout | {name: planned["answer"][0][name] for name in ("prompt_id", "group_id")}
    cases: list[tuple[int, str, str, Any, dict[str, str]]] = [
        (401, "The token is wrong", "plan", plan_args(2), {}),
        (401, "The token is wrong", "plan", plan_args(2), {"Authorization": "Bearer sécret"}),
        (404, 'There is no call "explode"', "explode", {}, good),
        (413, "The body has 104,857,600 bytes", "observe", b" " * (100 * 2**20), good),
        (415, "application/json", "plan", plan_args(2), {**good, "Content-Type": "text/plain"}),
        (400, "not JSON", "plan", b"{", good),
        (400, "not JSON", "plan", deep, good),
        (400, "NaN is no number", "plan", b'{"number": NaN}', good),
        (400, "not a JSON object", "plan", b"[1]", good),
        (409, "has the number None", "plan", {}, good),
        (400, "The call plan does not fit", "plan", {"number": 2}, good),
        (400, "The call plan does not fit", "plan", {"number": 2, "clock": {"step": 1}}, good),
        (
            400,
            "groups = -3, but it must be a whole number from 1 to 65,536",
            "emit",
            clocked(groups=-3),
            good,
        ),
        (400, "groups = 2000000, but it must be", "plan", clocked(groups=2_000_000), good),
        (400, "groups = True, but it must be", "plan", clocked(groups=True), good),
        (400, "step = -1, but it must be", "plan", clocked(step=-1), good),
        (400, "tokens = 1.5, but it must be", "plan", clocked(tokens=1.5), good),
        (400, "free = -1, but it must be", "plan", clocked(free=-1), good),
        (
            400,
            "progress = 1.5, but it must be a number from 0 to 1",
            "plan",
            clocked(progress=1.5),
            good,
        ),
        (400, "step = xxx", "plan", clocked(step="x" * 100_000), good),
        (409, "has the number xxx", "plan", {"number": "x" * 100_000}, good),
        (403, "not web pages", "plan", plan_args(2), {**good, "Origin": "http://evil.example"}),
        (400, "was never asked for", "observe", {"number": 2, "rollouts": [rollout]}, good),
        (
            400,
            "verdict = 'Right'",
            "observe",
            {"number": 2, "rollouts": [asked | {"verdict": "Right"}]},
            good,
        ),
        (
            400,
            "finish = 'eos'",
            "observe",
            {"number": 2, "rollouts": [asked | {"finish": "eos"}]},
            good,
        ),
        (400, "length = -3", "observe", {"number": 2, "rollouts": [asked | {"length": -3}]}, good),
        (
            400,
            "The checkpoint was written without",
            "load_state_dict",
            {"number": 2, "state": {}},
            good,
        ),
        (400, "no training prompt", "prompts", {"ids": ["p0"]}, good),
    ]
    for status, sentence, name, args, headers in cases:
        encoded = {key: value.encode("latin-1").decode("latin-1") for key, value in headers.items()}
        found, data = post(server.url, name, args, encoded)
        assert (found, sentence in data["error"]) == (status, True), (name, found, data)
        assert len(data["error"]) < 300, "a request is not sent back whole"
    found, data = post(server.url, "plan", {}, good, method="GET")
    assert found == 501 and "sent by POST" in data["error"]
    assert post(server.url, "state_dict", {}, good) == state


def send_raw(url: str, data: bytes) -> bytes:
    """The answer to a request that may be no HTTP; if it is none, it has no header."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60) as link:
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: link.recv(2**16), b""))


def test_without_a_token_only_its_own_address_is_answered(servers: Servers) -> None:
    server, guarded = (
        servers.start(lambda: build("uniform", World().ids, 0), token=t) for t in ("", "secret")
    )
    for host in (
        "evil.example",
        "evil.example:8377",
        "127.0.0.1.evil.example",
        "192.168.1.5",
        "[::1",
        "",
    ):
        found, data = post(server.url, "hello", {}, {"Host": host})
        assert (found, data) == (
            403,
            {"error": "The curriculum is served under its own address only."},
        ), host
    for host in ("localhost:9000", "127.0.0.1", "[::1]:8377"):  # a tunnel has a port of its own
        assert post(server.url, "hello", {}, {"Host": host})[0] == 200
    own = f"Host: 127.0.0.1:{server.server_port}\r\n"
    doubled = f"POST /hello HTTP/1.1\r\n{own}{own}Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}"
    assert b" 403 " in send_raw(server.url, doubled.encode())
    named = {"Host": "trainer.cluster", "Authorization": "Bearer secret"}
    assert post(guarded.url, "hello", {}, named)[0] == 200, "who has the token may use any name"


def test_a_long_call_does_not_hold_up_the_others(servers: Servers) -> None:
    inner = build("uniform", World().ids, 0)
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        """A curriculum whose plans wait until they are told to go on."""

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def plan(self, clock: Clock) -> Any:
            begun.set()
            assert go_on.wait(60)
            return inner.plan(clock)

    server = servers.start(lambda: Slow())
    planning = threading.Thread(target=post, args=(server.url, "plan", plan_args(1)))
    planning.start()
    assert begun.wait(60)
    try:
        assert post(server.url, "hello", {})[1]["answer"]["number"] == 0
        assert post(server.url, "prompts", {"ids": []}) == (200, {"answer": []})
    finally:
        go_on.set()
        planning.join()
    assert post(server.url, "hello", {})[1]["answer"]["number"] == 1


def test_garbage_is_not_sent_back_whole(servers: Servers) -> None:
    server = servers.start(lambda: build("uniform", World().ids, 0))
    for request in (b"garbage " * 5_000, b"x" * 50_000 + b" / HTTP/1.1"):
        answer = send_raw(server.url, request + b"\r\n\r\n")
        assert b"error" in answer and len(answer) < 1_000


def test_slow_connections_are_bounded_and_keep_nobody_out(servers: Servers) -> None:
    server = servers.start(lambda: build("uniform", World().ids, 0))
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(3 * CONNECTIONS):
            link = stack.enter_context(
                socket.create_connection(server.server_address[:2], timeout=60)
            )
            link.sendall(b"POST /hello HTTP/1.1\r\n")  # and never the rest
        assert post(server.url, "hello", {})[0] == 200
        assert threading.active_count() <= before + CONNECTIONS


def test_the_client_says_what_is_wrong(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    server = servers.start(lambda: build("uniform", World().ids, 0), token="secret")
    with pytest.raises(WhetError, match="The token is wrong"):
        RemoteCurriculum(server.url)
    remote = RemoteCurriculum(server.url, token="secret")
    with pytest.raises(WhetError, match="takes at most 16 MB"):
        remote.load_state_dict({"much": "x" * (17 * 2**20)})
    assert len(remote.plan(CLOCK)) == 2
    remote.close()
    for url in (
        "127.0.0.1:80",
        "https://127.0.0.1",
        "http://127.0.0.1:many",
        "http://127.0.0.1:65536",
        "http://[::1",
    ):
        with pytest.raises(WhetError, match="is no address"):
            RemoteCurriculum(url)
    with pytest.raises(WhetError, match="does not answer"):
        RemoteCurriculum("http://127.0.0.1:9", patience=0.0)


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_body_of_any_form_is_read_again_after_a_restart(coding: str, tmp_path: Path) -> None:
    body = (
        json.dumps({"number": 1, "clock": fields_of(CLOCK)}, indent=1)
        .replace("\n", "\r\n")
        .encode(coding)
    )
    for number in (1, 1):  # made once, then read from the journal
        service = Service(lambda: build("uniform", World().ids, 0), tmp_path)
        status, answer = service.answer("plan", body)
        assert (status, service.number) == (200, number) and len(answer["answer"]) == 2
        service.close()


def test_addresses_that_cannot_be_served(servers: Servers, tmp_path: Path) -> None:
    server = servers.start(lambda: build("uniform", World().ids, 0))
    with pytest.raises(WhetError, match=r"Port \d+ of 127.0.0.1 cannot be opened"):
        CurriculumServer(server.service, port=server.server_address[1])
    with pytest.raises(WhetError, match="needs a --token"):
        CurriculumServer(server.service, host="0.0.0.0")
    with pytest.raises(WhetError, match="cannot be opened"):
        CurriculumServer(server.service, host="no.such.host.invalid", token="x")


# ---- a real process


RECIPE = """
[[data]]
path = "{path}"

[held_out]
size = 0

[rollout]
max_tokens = 32

[curriculum]
name = "speed"
rollouts = 5
max_age = 1
patience = 50
speed = {{ n_init = 2 }}
"""


class Killable:
    """`whet curriculum serve` as a process, which is killed now and then and started again on its port."""

    def __init__(self, folder: Path, ids: Sequence[str]):
        self.recipe, self.state, self.port = folder / "speed.toml", folder / "state", 0
        data = folder / "data.jsonl"
        rows = [
            {"id": name, "problem": f"What is {name}?", "answer": str(i)}
            for i, name in enumerate(ids)
        ]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.recipe.write_text(RECIPE.format(path=data))
        self.start()

    def start(self) -> None:
        args = [
            "curriculum",
            "serve",
            str(self.recipe),
            "--state",
            str(self.state),
            "--port",
            str(self.port),
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "whet", *args], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"24 prompts is at (http://127\.0\.0\.1:(\d+))\.", line)
        assert found, line
        self.url, self.port = found[1], int(found[2])

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class KilledNowAndThen(RemoteCurriculum):
    """At some calls the server is killed a moment after the call was sent, and started again."""

    def __init__(self, server: Killable, kills: set[int], rng: random.Random):
        super().__init__(server.url, patience=120.0)
        self.killable, self.kills, self.rng, self.sent = server, kills, rng, 0

    def _call(self, name: str, **args: Any) -> Any:
        self.sent += 1
        if self.sent not in self.kills:
            return super()._call(name, **args)

        def kill() -> None:
            time.sleep(self.rng.random() * 0.006)
            self.killable.kill()
            self.killable.start()

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            return super()._call(name, **args)
        finally:
            thread.join()


def play_killed(tmp_path: Path, kills: int) -> None:
    world = World(slots=12, updates=6, seed=2)
    server = Killable(tmp_path, world.ids)
    try:
        calm = play(
            lambda ids, seed: RemoteCurriculum(server.url),
            world,
            max_age=1,
            rollouts=5,
            patience=50,
        )
        numbered = RemoteCurriculum(server.url)._number
        server.kill()
        (tmp_path / "state" / "state.json").unlink()
        (tmp_path / "state" / "calls.jsonl").unlink()
        server.start()
        rng = random.Random(kills)
        chosen = set(rng.sample(range(1, numbered), kills))
        hurt = KilledNowAndThen(server, chosen, rng)
        killed = play(lambda ids, seed: hurt, world, max_age=1, rollouts=5, patience=50)
        assert killed.log == calm.log and calm.batches == 6 and hurt._number == numbered
        assert [prompt.text for prompt in hurt.prompts(["p3"])] == ["What is p3?"]
        hurt.updated(CLOCK, Report(metrics={}))
    finally:
        server.kill()


@pytest.mark.slow
def test_a_server_killed_at_twenty_calls_goes_on(tmp_path: Path) -> None:
    play_killed(tmp_path, kills=20)


def test_a_recipe_that_does_not_exist(tmp_path: Path) -> None:
    args = [sys.executable, "-m", "whet", "curriculum", "serve", str(tmp_path / "none.toml")]
    done = subprocess.run(args, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "none.toml" in done.stderr
    assert SAMPLING.max_tokens == 32
