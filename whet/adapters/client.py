"""A curriculum that lives in another process: `whet curriculum serve` holds it, this class asks it over HTTP.

Calls that change the curriculum are numbered. One that got no answer is sent again under its number, so it counts once,
also if the server was killed and started again meanwhile. Only one trainer may drive a server. The calls as JSON, which
docs/remote.md lists, are here for both sides: every record is an object with the names of `whet/types.py`, traces do
not travel, and arrays of `Report.signals` are written as in a state (`curriculum/base.py`).
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, get_args
from urllib.parse import urlsplit

from whet import types
from whet.curriculum.base import from_json, to_json
from whet.errors import Starved, WhetError
from whet.types import Batch, Clock, Group, Prompt, Report, Request, Rollout, fields_of

PIECE = 4_000  # rollouts per call of `observe`; more might exceed a body
LIMIT = 16 * 2**20  # bytes of a body
SECONDS = 30.0  # for one request
# numbered: they change the curriculum
CALLS = ("plan", "observe", "emit", "updated", "load_state_dict")
QUESTIONS = ("hello", "holds", "waits", "metrics", "state_dict", "prompts")  # these do not


class RemoteCurriculum:
    """The curriculum at a URL, with the methods of `whet.curriculum.base.Curriculum`.

    patience: seconds for which a server that does not answer is tried again, as while it is started again.
    """

    _connection: http.client.HTTPConnection | None = None

    def __init__(self, url: str, *, token: str = "", patience: float = 60.0):
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname, parts.port) if parts.scheme == "http" else (None, None)
        except ValueError:  # a port that is no number or too large, or half an IPv6 address
            host = port = None
        if not host or not port:
            raise WhetError(
                f'"{url}" is no address of a curriculum; it looks like http://127.0.0.1:8377.'
            )
        self.url = f"http://{parts.netloc}"
        self.patience = patience
        self._address = (host, port)
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._client, self._lock = uuid.uuid4().hex, threading.Lock()
        hello = self._ask("hello")
        self._number: int = hello["number"]
        self.needs = frozenset[str](hello["needs"])

    # The protocol

    def plan(self, clock: Clock) -> list[Request]:
        asked = self._call("plan", clock=fields_of(clock))
        return [
            Request(**{**one, "sampling": types.sampling_from_json(one["sampling"])})
            for one in asked
        ]

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        for first in range(0, max(1, len(rollouts)), PIECE):
            self._call(
                "observe",
                rollouts=[types.rollout_to_json(r) for r in rollouts[first : first + PIECE]],
            )

    def emit(self, clock: Clock) -> Batch | None:
        if (batch := self._call("emit", clock=fields_of(clock))) is None:
            return None
        read = types.rollout_from_json
        groups = tuple(
            Group(**{**g, "rollouts": tuple(map(read, g["rollouts"]))}) for g in batch["groups"]
        )
        return Batch(**{**batch, "groups": groups})

    def updated(self, clock: Clock, report: Report) -> None:
        found = report.signals.items()
        signals = [
            [*key, {name: to_json(value) for name, value in values.items()}]
            for key, values in found
        ]
        self._call(
            "updated",
            clock=fields_of(clock),
            report={"metrics": dict(report.metrics), "signals": signals},
        )

    def holds(self) -> set[int]:
        return set(self._ask("holds"))

    def waits(self) -> set[int]:
        return set(self._ask("waits"))

    def metrics(self) -> dict[str, float]:
        return dict(self._ask("metrics"))

    def state_dict(self) -> dict[str, Any]:
        return dict(self._ask("state_dict"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._call("load_state_dict", state=dict(state))

    def prompts(self, ids: Sequence[str]) -> list[Prompt]:
        """The training prompts with these ids, as the server's recipe reads them."""
        return [
            Prompt(**{**p, "messages": tuple(p["messages"])})
            for p in self._ask("prompts", ids=list(ids))
        ]

    # HTTP

    def _call(self, name: str, **args: Any) -> Any:
        """A numbered call; the number moves on once it is answered."""
        with self._lock:
            number = self._number + 1
            try:
                answer = self._send(name, {"number": number, "client": self._client, **args})
            except Starved:
                self._number = number
                raise
            self._number = number
            return answer

    def _ask(self, name: str, **args: Any) -> Any:
        with self._lock:
            return self._send(name, args)

    def _send(self, name: str, args: Mapping[str, Any]) -> Any:
        body = json.dumps(args).encode()
        if len(body) > LIMIT:
            size = f"{len(body) / 2**20:.0f} MB"
            raise WhetError(
                f"The call {name} has {size}, and the server takes at most {LIMIT >> 20} MB."
            )
        until = time.monotonic() + self.patience
        pause = 0.02
        while True:
            try:
                status, data = self._post(f"/{name}", body)
                break
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.close()
                if time.monotonic() + pause > until:
                    why = f"{type(error).__name__}: {error}".rstrip(": ")
                    raise WhetError(
                        f"The curriculum at {self.url} does not answer ({why})."
                    ) from None
                time.sleep(pause)
                pause = min(1.0, 1.5 * pause)
        if status == 200:
            return data["answer"]
        kind = Starved if data.get("starved") else WhetError
        raise kind(
            str(data.get("error", f"The curriculum at {self.url} answered with status {status}."))
        )

    def _post(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(*self._address, timeout=SECONDS)
        self._connection.request("POST", path, body, self._headers)
        response = self._connection.getresponse()
        data = json.loads(response.read())
        if not isinstance(data, dict):
            raise ValueError("the answer is no object")
        return response.status, data

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    __del__ = close


def check_outcome(where: str, outcome: Any) -> None:
    """Refuse what no rollout has, since a misspelt verdict would count as wrong. `outcome` comes from a trainer."""
    length = outcome.length
    verdict = outcome.verdict
    finish = outcome.finish
    if length < 0 or verdict not in get_args(types.Verdict) or finish not in get_args(types.Finish):
        raise WhetError(
            f"{where} cannot have length = {length}, verdict = {verdict!r} and finish = {finish!r}."
        )


def perform(curriculum: Any, call: str, args: Mapping[str, Any]) -> Any:
    """In the server, make a numbered call and return its answer as JSON. Arguments that do not fit raise any error."""
    if call == "plan":
        asked = curriculum.plan(Clock(**args["clock"]))
        return [fields_of(request) | {"sampling": fields_of(request.sampling)} for request in asked]
    if call == "observe":
        rollouts = [types.rollout_from_json(rollout) for rollout in args["rollouts"]]
        for rollout in rollouts:
            check_outcome(f"Rollout {rollout.index} of group {rollout.group_id}", rollout)
        curriculum.observe(rollouts)
    elif call == "emit":
        batch = curriculum.emit(Clock(**args["clock"]))
        write = types.rollout_to_json
        groups = (
            [fields_of(g) | {"rollouts": [*map(write, g.rollouts)]} for g in batch.groups]
            if batch
            else []
        )
        return fields_of(batch) | {"groups": groups} if batch else None
    elif call == "updated":
        told = args["report"]
        found = (
            (g, i, {name: from_json(v) for name, v in values.items()})
            for g, i, values in told.get("signals", ())
        )
        report = Report(
            metrics=told.get("metrics", {}), signals={(g, i): values for g, i, values in found}
        )
        curriculum.updated(Clock(**args["clock"]), report)
    else:
        curriculum.load_state_dict(args["state"])
    return None
