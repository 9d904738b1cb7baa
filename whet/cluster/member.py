"""A member of a fleet: the process that has a model, an engine on its very Parameters, and a share of the learner. In a
cluster it may be a worker, which has no learner, or a learner, which has no engine.

`crew.py` starts it and talks to it over a channel. Between two steps of its engine a member looks at what it was told;
it sends rollouts as they finish and waits when there is nothing to do. Token ids come with requests and batches, since
a member has no data. It ends when it is told to, or when the channel ends because the driver did.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from whet.cluster.channel import Channel, attend, pack
from whet.cluster.ranks import Ranks, Unmet, exchange, is_unmet
from whet.learn.base import Lesson
from whet.learn.checkpoint import load_checkpoint, write_weights
from whet.learn.learner import Learner
from whet.types import Batch, Report, Request

if TYPE_CHECKING:
    from whet.rollout.engine import LocalEngine
    from whet.rollout.vllm import VllmEngine

    OwnEngine = LocalEngine | VllmEngine

Parcel = Mapping[str, np.ndarray]  # the bytes of each tensor, by its name
ALIVE_S = 5.0  # seconds after which a member that decodes says that it does
AHEAD = 64 * 2**20  # bytes that may wait for the driver to read them while a member decodes
_PR_SET_PDEATHSIG = 1


class SentPrompts:
    """The token ids that came with the newest message: what `encode` is to a process without data."""

    def __init__(self) -> None:
        self.known: Mapping[str, Sequence[int]] = {}

    def __call__(self, prompt_id: str) -> Sequence[int]:
        return self.known[prompt_id]


# Made by `whet.processes`: from what `begin` was given, the model, the engine, and what builds the learner. A rollout
# worker has no learner, and a learner apart from the workers has no engine.
Build = Callable[[Mapping[str, Any], SentPrompts], tuple[Any, "OwnEngine | None", Callable[[], Learner] | None]]


class Gone(Exception):
    """The driver has ended."""


class FleetMember:
    """Methods without an underscore are what a driver may ask for."""

    def __init__(self, channel: Channel, build: Build) -> None:
        self._channel, self._build = channel, build
        self._prompts = SentPrompts()
        self._engine: OwnEngine | None = None
        self.parcel: Parcel = {}  # weights for the workers
        self.brought: Parcel = {}  # weights that were brought here
        self._heard = time.monotonic()
        self._rank = 0

    # ---- what it is told

    def begin(self, order: Mapping[str, Any]) -> tuple[str, str]:
        """Build engine and learner. Returns what all must agree on: what they were built by, and the weights."""
        self._rank, self._later = order["rank"], order["later"]
        self._model, self._engine, self._make = self._build(order, self._prompts)
        return ("", "") if self._later else self.complete()

    def complete(self) -> tuple[str, str]:
        """Build the learner: `later` than the engine where the group is needed to divide the weights."""
        recipe = [getattr(self._engine, name, "") for name in ("seed", "slots", "context", "mode", "on_update")]
        if self._make is not None:
            self._learner = self._make()
            recipe.append(self._learner.config)
        return repr(recipe), self._checksum(self._model.parameters())

    def meeting_place(self) -> str:
        """Where the group can meet: a port of this node that is free."""
        host = self._channel.end.getsockname()[0]
        with socket.create_server((host, 0)) as server:
            return f"tcp://{host}:{server.getsockname()[1]}"

    def pack_up(self) -> str:
        """Copy the weights that are trained to main memory, for the workers. Returns their checksum."""
        weights = dict(self._model.named_parameters())  # whole, though a learner may hold parts
        live = {name: weights[name] for name in self._learner.optimizer.live}
        self.parcel = {name: _as_bytes(tensor) for name, tensor in live.items()}
        return self._checksum(live.values())

    def publish(self, version: int) -> str:
        """Take over the weights that were brought here; the checksum of what this member then holds."""
        parcel, self.brought = self.brought, {}
        self._hand_out()
        weights = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, data in parcel.items():
                weights[name].copy_(_from_bytes(data, weights[name]))
        before = self._local.version
        if version != before:
            self._local.update(version)
            self._hand_out(before)  # what was cut was written by the weights before
        else:
            self._local.take_back()  # an engine with a copy of the weights takes them again before it decodes
        return self._checksum(weights[name] for name in parcel)

    def form(self, meeting: str, size: int, backend: str, seconds: float, later: float) -> None:
        """Join the group of all members, in place of an earlier one."""
        if dist.is_initialized():
            dist.destroy_process_group()
        limit = timedelta(seconds=seconds)
        with exchange():
            dist.init_process_group(backend, init_method=meeting, rank=self._rank, world_size=size, timeout=limit)
        team = Ranks()
        team.gather(0)  # connections are made at the first use
        if not self._later:
            self._learner.team = team
        _set_pg_timeout(timedelta(seconds=later))  # a member may have more to compute than the others

    def position(self) -> int:
        return self._learner.version

    def adopt(self, source: int, those: Sequence[int], version: int) -> None:
        """`those` take over weights, masters, moments and state of the member `source`."""
        learner, mine = self._learner, self._rank == source
        kinds: dict[str, Mapping[str, Tensor]] = {"live": learner.optimizer.live, **learner.tensors()} if mine else {}
        shapes = [(kind, n, t.shape, t.dtype) for kind, named in kinds.items() for n, t in named.items()]
        box: list[Any] = [(shapes, learner.state_dict()) if mine else None]
        with exchange():
            dist.broadcast_object_list(box, src=source)
        shapes, state = box[0]
        got: dict[str, dict[str, Tensor]] = {}
        for kind, name, shape, dtype in shapes:
            tensor = kinds[kind][name].detach() if mine else torch.empty(shape, dtype=dtype)
            moved = tensor.to(learner.device).contiguous()
            with exchange():
                dist.broadcast(moved, src=source)
            got.setdefault(kind, {})[name] = moved
        if self._rank in those:
            with torch.no_grad():
                for name, tensor in got.pop("live").items():
                    learner.optimizer.live[name].copy_(tensor)
            learner.load(got, state)
        if self._engine is not None and self._engine.version != version:
            self._engine.update(version)

    def ask(self, ticket: int | None, requests: Sequence[Request], prompts: Mapping[str, Sequence[int]]) -> None:
        self._prompts.known = prompts
        if ticket is None:
            self._local.submit(requests)
        else:
            self._local.order(requests, ticket)

    def step(
        self, batch: Batch, progress: float, needs: Set[str], prompts: Mapping[str, Sequence[int]]
    ) -> tuple[Report, float]:
        """Take part in a step. If it fails, because another member died, all is as before it."""
        self._prompts.known = prompts
        learner = self._learner
        # A step with one update changes nothing before its last exchange with the others. One with several updates,
        # or with scores to exchange after its update, must be able to go back.
        several = learner.config.updates * (batch.minibatches or learner.config.minibatches) > 1 or bool(needs)
        held = self._held() if several and not self._later and not learner.optimizer.divided else None
        try:
            return learner.step(batch, progress, needs), learner.scored_s
        except Exception:
            learner.optimizer.zero_grad()
            if held is not None:
                live, tensors, state = held
                with torch.no_grad():
                    for name, tensor in live.items():
                        learner.optimizer.live[name].copy_(tensor)
                learner.load(tensors, state)
            raise

    def teach(self, steps: int, lr: float) -> None:
        """Take part in a warm start; its batches come one by one, and each answer lets the next one come."""

        def batches() -> Iterator[Lesson]:
            while not isinstance(told := self._next(None), tuple):
                yield told
            raise Gone  # a question instead of a lesson: the run is being stopped

        self._learner.warm_start(
            batches(), steps=steps, lr=lr, on_step=lambda step, loss: self._say("taught", step, loss)
        )

    def update(self, version: int) -> tuple[int, str]:
        """The weights have changed. Returns what all members must agree on."""
        self._hand_out()
        before = self._local.version
        self._local.update(version)
        self._hand_out(before)  # what was cut was written by the weights before
        return self._learner.version, self._checksum(self._learner.trained())

    def release(self) -> None:
        self._local.release()

    def take_back(self) -> None:
        self._local.take_back()

    def drop(self) -> None:
        """Forget what was asked for: the run goes on from an earlier checkpoint."""
        self._local.drop()

    def stats(self) -> dict[str, float]:
        return self._local.stats()

    def state_dict(self) -> dict[str, Any]:
        self._hand_out()
        return self._local.state_dict()

    def load_state(self, state: Mapping[str, Any], prompts: Mapping[str, Sequence[int]]) -> None:
        self._prompts.known = prompts
        self._local.load_state_dict(state)

    def can(self) -> frozenset[str]:
        return self._local.can

    def notes(self) -> list[str]:
        return self._local.notes()

    def learner_state(self) -> dict[str, Any]:
        return self._learner.state_dict()

    def write(self, folder: str) -> None:
        self._learner.write(Path(folder))

    def write_together(self, folder: str) -> None:
        """The first member writes what all have: masters and moments, at least, are divided among them."""
        learner, team = self._learner, self._learner.team
        assert isinstance(team, Ranks)
        kinds = learner.tensors()
        whole = {kind: team.collect(kinds.get(kind, {})) for kind in team.divided}
        if self._rank == 0:
            kinds |= {kind: tensors for kind, tensors in whole.items() if tensors}
            write_weights(Path(folder), learner.whole, kinds)

    def restore(self, folder: str) -> int:
        self._learner.restore(load_checkpoint(Path(folder)))
        return self._learner.version

    # ---- how it serves

    def serve(self) -> None:
        """Obey until the driver ends, and decode meanwhile."""
        while True:
            busy = self._engine is not None and self._engine.busy
            if (told := self._next(0.0 if busy else None)) is not None:
                self._obey(*told)
            elif self._engine is not None and busy:
                self._engine.step()
                self._hand_out()

    def _obey(self, serial: int, name: str, args: Sequence[Any]) -> None:
        if name == "leave":
            raise Gone
        try:
            value = getattr(self, name)(*args)
        except Gone:
            raise
        except Exception as error:
            kind = Unmet if is_unmet(error) else type(error)
            self._say("failed", serial, kind.__name__, str(error) or repr(error))
        else:
            if name != "ask":
                self._say("done", serial, value)
            self._hand_out()

    def _hand_out(self, version: int | None = None) -> None:
        """Send what has finished, with the version of the weights; without any, say now and then that it works."""
        if self._engine is None:
            return
        if found := self._engine.take():
            self._say("rollouts", self._engine.version if version is None else version, found, wait=False)
        elif self._engine.busy and time.monotonic() - self._heard > ALIVE_S:
            self._say("alive", wait=False)

    def _say(self, *message: Any, wait: bool = True) -> None:
        self._heard = time.monotonic()
        self._channel.send(pack(message))
        while self._channel.pending > (0 if wait else AHEAD):
            attend([self._channel], None)
            if self._channel.closed:
                raise Gone

    def _next(self, timeout: float | None) -> Any:
        while (message := self._channel.take()) is None:
            if self._channel.closed:
                raise Gone
            attend([self._channel], timeout)
            if timeout is not None:
                return self._channel.take()
        return message

    @property
    def _local(self) -> OwnEngine:
        assert self._engine is not None, "a member begins first"
        return self._engine

    def _held(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Copies in main memory of all that a step changes."""

        def copies(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}

        learner = self._learner
        tensors = {kind: copies(named) for kind, named in learner.tensors().items()}
        return copies(learner.optimizer.live), tensors, learner.state_dict()

    @staticmethod
    @torch.no_grad()
    def _checksum(tensors: Any) -> str:
        """Equal where the weights are: a sum per tensor in double precision."""
        sums = torch.stack([tensor.detach().sum(dtype=torch.float64) for tensor in tensors])
        return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()


def _as_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy()


def _from_bytes(data: np.ndarray, like: Tensor) -> Tensor:
    """A tensor over these bytes, which are only read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the bytes of Ray's store cannot be written
        return torch.from_numpy(data).view(like.dtype).view(like.shape)


def run_member(handle: int, parent: int, build: Build) -> None:
    """The life of the process. Signals are the driver's affair, and it ends with the driver, whatever it is doing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:
        member = FleetMember(Channel(socket.socket(fileno=handle)), build)
        warnings.showwarning = lambda message, *where: member._say("note", str(message))
        with contextlib.suppress(Gone):
            member.serve()
    sys.stderr.flush()
    os._exit(0)  # a group whose other members are gone may not be taken apart in order
