"""A curriculum that lives in another process: `whet curriculum serve` holds it, this class asks it over HTTP.

Calls that change the curriculum are numbered. One that got no answer is sent again under its number, so it counts once,
also if the server was killed and started again meanwhile. Only one trainer may drive a server.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from whet.adapters.wire import LIMIT, SECONDS, batch_from_json, report_to_json, request_from_json
from whet.errors import Starved, WhetError
from whet.types import Batch, Clock, Prompt, Report, Request, Rollout, fields_of, rollout_to_json

PIECE = 4_000  # rollouts per call of `observe`; more might exceed a body


class RemoteCurriculum:
    """The curriculum at a URL, with the methods of `whet.curriculum.base.Curriculum`.

    patience: seconds for which a server that does not answer is tried again, as while it is started again.
    """

    _connection: http.client.HTTPConnection | None = None

    def __init__(self, url: str, *, token: str = "", patience: float = 60.0):
        parts = urlsplit(url)
        port = parts.netloc.rpartition(":")[2]
        if parts.scheme != "http" or not parts.hostname or not port.isdigit():
            raise WhetError(f'"{url}" is no address of a curriculum; it looks like http://127.0.0.1:8377.')
        self.url, self.patience = f"http://{parts.netloc}", patience
        self._address = (parts.hostname, int(port))
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._client, self._lock = uuid.uuid4().hex, threading.Lock()
        hello = self._ask("hello")
        self._number: int = hello["number"]
        self.needs, self.prompts_count = frozenset[str](hello["needs"]), int(hello["prompts"])

    # The protocol

    def plan(self, clock: Clock) -> list[Request]:
        return [request_from_json(request) for request in self._call("plan", clock=fields_of(clock))]

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        for first in range(0, max(1, len(rollouts)), PIECE):
            self._call("observe", rollouts=[rollout_to_json(r) for r in rollouts[first : first + PIECE]])

    def emit(self, clock: Clock) -> Batch | None:
        return batch_from_json(self._call("emit", clock=fields_of(clock)))

    def updated(self, clock: Clock, report: Report) -> None:
        self._call("updated", clock=fields_of(clock), report=report_to_json(report))

    def holds(self) -> set[int]:
        return set(self._ask("holds"))

    def waits(self) -> set[int]:
        return set(self._ask("waits"))

    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = self._ask("metrics")
        return metrics

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._ask("state_dict")
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._call("load_state_dict", state=dict(state))

    def prompts(self, ids: Sequence[str]) -> list[Prompt]:
        """The training prompts with these ids, as the server's recipe reads them."""
        return [Prompt(**{**p, "messages": tuple(p["messages"])}) for p in self._ask("prompts", ids=list(ids))]

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
            raise WhetError(f"The call {name} has {size}, and the server takes at most {LIMIT >> 20} MB.")
        until, pause = time.monotonic() + self.patience, 0.02
        while True:
            try:
                status, data = self._post(f"/{name}", body)
                break
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.close()
                if time.monotonic() + pause > until:
                    why = f"{type(error).__name__}: {error}".rstrip(": ")
                    raise WhetError(f"The curriculum at {self.url} does not answer ({why}).") from None
                time.sleep(pause)
                pause = min(1.0, 1.5 * pause)
        if status == 200:
            return data["answer"]
        kind = Starved if data.get("starved") else WhetError
        raise kind(str(data.get("error", f"The curriculum at {self.url} answered with status {status}.")))

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
