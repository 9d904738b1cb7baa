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
import itertools
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from whet.cluster.channel import Bundle, Channel, attend, filled, pack
from whet.cluster.ranks import Pair, Ranks, Unmet, exchange, is_unmet
from whet.learn.base import Lesson, T
from whet.learn.checkpoint import load_checkpoint, write_weights
from whet.learn.learner import Learner
from whet.types import Batch, Report, Request

if TYPE_CHECKING:
    from whet.draft.training import AdaptiveDrafter, Copy
    from whet.rollout.engine import LocalEngine
    from whet.rollout.vllm import VllmEngine

    OwnEngine = LocalEngine | VllmEngine
    Built = tuple[Any, OwnEngine | None, Callable[[], Learner] | None, AdaptiveDrafter | None]

# seconds after which a member that decodes says so, and an idle one sees whether it must leave
ALIVE_S = 1.0
ALIGN = 512  # bytes: each tensor of a parcel begins at a multiple of it
PIECE = 64 * 2**20  # bytes of a parcel that have one sum in its checksum
AHEAD = 64 * 2**20  # bytes that may wait for the driver to read them while a member decodes
_PR_SET_PDEATHSIG = 1


class SentPrompts:
    """The token ids that came with the newest message: what `encode` is to a process without data."""

    def __init__(self) -> None:
        self.known: Mapping[str, Sequence[int]] = {}

    def __call__(self, prompt_id: str) -> Sequence[int]:
        return self.known[prompt_id]


# Made by `whet.processes`: from what `begin` was given, the model, the engine, what builds the learner, and the drafter
# where it learns. A rollout worker has no learner, and a learner apart from the workers has no engine.
Build = Callable[[Mapping[str, Any], SentPrompts], "Built"]


class Gone(Exception):
    """The driver has ended."""


class Parcel(NamedTuple):
    """Weights for workers, in one buffer, which processes of the same place open by its handle. Others get `data`."""

    names: tuple[str, ...]
    place: str
    handle: Any  # by which another process opens the buffer; None where none can
    data: Any = None  # the buffer, or its bytes


class FleetMember:
    """Methods without an underscore are what a driver may ask for; what there is no method for is the engine's."""

    def __init__(self, channel: Channel, build: Build) -> None:
        self._channel = channel
        self._build = build
        self._prompts = SentPrompts()
        self._engine: OwnEngine | None = None
        self._drafter: AdaptiveDrafter | None = None
        # seconds without requests, and those of them in which the drafter was trained
        self._idle = self._used = 0.0
        self.parcel: Parcel | None = None  # weights for the workers
        self.brought: Parcel | None = None  # weights that were brought here
        self._pairs: dict[int, tuple[str, Pair]] = {}  # by the number of the worker
        self._heard = time.monotonic()
        self._rank = 0
        self.leaving = False  # set from outside: this process must go soon

    # ---- what it is told

    def begin(self, order: Mapping[str, Any]) -> tuple[str, str]:
        """Build engine and learner. Returns what all must agree on: what they were built by, and the weights."""
        self._rank, self._later = order["rank"], order["later"]
        self._model, self._engine, self._make, self._drafter = self._build(order, self._prompts)
        self._place = place_of(self._model.device)
        # Buffers for workers, by the number of the weights in them, and the one of a learner that is open here: handle,
        # bytes, and the tensors in these, since cutting them out of the bytes takes as long as all the rest.
        self._buffers: dict[int, tuple[Any, Tensor, list[Tensor]]] = {}
        self._opened: tuple[Any, Any, Any] = (None, None, None)
        self._named: dict[str, Tensor] = {}
        return ("", "") if self._later else self.complete()

    def complete(self) -> tuple[str, str]:
        """Build the learner: `later` than the engine where the group is needed to divide the weights."""
        recipe = [
            getattr(self._engine, name, "")
            for name in ("seed", "slots", "context", "mode", "on_update")
        ]
        if self._make is not None:
            self._learner = self._make()
            recipe.append(self._learner.config)
        return repr(recipe), self._checksum(self._model.parameters())

    def meeting_place(self) -> str:
        """Where the group can meet: a port of this node that is free."""
        host = self._channel.end.getsockname()[0]
        with socket.create_server((host, 0)) as server:
            return f"tcp://{host}:{server.getsockname()[1]}"

    def pack_up(self, issue: int, used: Set[int]) -> tuple[str, Parcel]:
        """Copy the weights that are trained to where workers can read them while others are trained. Returns the copy's
        checksum and where it lies. issue: their number; used: the numbers of those that workers may be reading."""
        names = tuple(self._learner.optimizer.live)
        live = self._weights(names)
        free = next((number for number in self._buffers if number not in used), None)
        if free is None:
            buffer, handle = make_buffer(sum(map(_room, live)), self._model.device)
            self._buffers[issue] = handle, buffer, _cut(buffer, live)
        else:
            self._buffers[issue] = self._buffers.pop(free)
        handle, buffer, theirs = self._buffers[issue]
        torch._foreach_copy_(theirs, live)
        self.parcel = Parcel(names, self._place, handle, buffer)
        # by then the copy is whole
        return self._checksum(buffer.split(PIECE)), self.parcel._replace(data=None)

    def cross(
        self,
        number: int,
        name: str,
        where: tuple[str, int],
        issue: int,
        parcel: Parcel,
        seconds: float,
    ) -> None:
        """Weights from card to card, in a thread beside all else: a learner sends those of this issue to a worker with
        this number, and the worker gets them. A pair is kept, by its name, until it fails or the worker is another."""
        known, pair = self._pairs.pop(number, ("", None))
        if pair is not None and known != name:
            pair.close()
        if pair is None or known != name:
            pair = Pair(where, name, int(self._make is None), self._model.device, seconds)
        try:
            if self._make is not None:
                pair.send(self._buffers[issue][1])
            else:
                size = sum(map(_room, self._weights(parcel.names)))
                self.brought = parcel._replace(data=pair.receive(size))
        except Unmet:
            pair.close()
            raise
        self._pairs[number] = name, pair

    def _weights(self, names: Iterable[str]) -> list[Tensor]:
        """Those of the model, whole, though a learner may hold parts; found once, as that takes as long as a copy."""
        if not self._named:
            self._named = {name: weight.detach() for name, weight in self._model.named_parameters()}
        return [self._named[name] for name in names]

    def publish(self, version: int, drafter: Copy | None, where: Parcel | None) -> str:
        """Take over the weights that lie there or, without a place, were brought here; the checksum of what was taken,
        once all is. It is empty, and nothing has changed, where nothing came or the memory cannot be opened here."""
        parcel = where or self.brought
        self.brought = None
        if parcel is None:  # it was to come from card to card
            self._say("note", "Weights go through Ray's store, since NCCL did not carry them.")
            return ""
        mine = self._weights(parcel.names)
        if parcel.data is not None:
            buffer = _from_bytes(parcel.data)
            theirs = _cut(buffer, mine)
        elif self._open(parcel, mine):
            _, buffer, theirs = self._opened
        else:
            return ""
        self.draft_with(drafter)
        self._hand_out()
        torch._foreach_copy_(mine, theirs)
        before = self._local.version
        if version != before:
            self._local.update(version)
            self._hand_out(before)  # what was cut was written by the weights before
        else:
            # an engine with a copy of the weights takes them again before it decodes
            self._local.take_back()
        return self._checksum(buffer.split(PIECE))  # by then nothing is read any more

    def _open(self, parcel: Parcel, like: Sequence[Tensor]) -> bool:
        """Map the buffer of a learner, once: its handle stays the same."""
        if parcel.handle is None or not parcel.place or parcel.place != self._place:
            return False
        if parcel.handle != self._opened[0]:
            self._opened = (None, None, None)
            try:
                buffer = open_buffer(parcel.handle, self._model.device)
                self._opened = (parcel.handle, buffer, _cut(buffer, like))
            except (OSError, RuntimeError) as error:
                self._say(
                    "note",
                    f"Weights go through Ray's store, since memory cannot be shared: {error}",
                )
                return False
        return True

    def form(self, meeting: str, size: int, backend: str, seconds: float, later: float) -> None:
        """Join the group of all members, in place of an earlier one."""
        if dist.is_initialized():
            dist.destroy_process_group()
        limit = timedelta(seconds=seconds)
        with exchange():
            dist.init_process_group(
                backend, init_method=meeting, rank=self._rank, world_size=size, timeout=limit
            )
        team = Ranks()
        team.gather(0)  # connections are made at the first use
        if not self._later:
            self._learner.team = team
        # a member may have more to compute than the others
        _set_pg_timeout(timedelta(seconds=later))

    def position(self) -> int:
        return self._learner.version

    def adopt(self, source: int, those: Sequence[int], version: int, drafter: Copy | None) -> None:
        """`those` take over weights, masters, moments and state of the member `source`."""
        self.draft_with(drafter)
        learner = self._learner
        mine = self._rank == source
        kinds: dict[str, Mapping[str, Tensor]] = (
            {"live": learner.optimizer.live, **learner.tensors()} if mine else {}
        )
        shapes = [
            (kind, n, t.shape, t.dtype) for kind, named in kinds.items() for n, t in named.items()
        ]
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

    def ask(
        self, ticket: int | None, requests: Sequence[Request], prompts: Mapping[str, Sequence[int]]
    ) -> None:
        self._prompts.known = prompts
        if ticket is None:
            self._local.submit(requests)
        else:
            self._local.order(requests, ticket)

    def step(
        self,
        sent: tuple[Batch, Bundle],
        progress: float,
        needs: Set[str],
        prompts: Mapping[str, Sequence[int]],
    ) -> tuple[Report, float]:
        """Take part in a step. If it fails, because another member died, all is as before it."""
        self._prompts.known = prompts
        learner = self._learner
        batch = filled(*sent)
        # A step with one update changes nothing before its last exchange with the others. One with several updates,
        # or with scores to exchange after its update, must be able to go back.
        several = learner.config.updates * (
            batch.minibatches or learner.config.minibatches
        ) > 1 or bool(needs)
        held = (
            self._held() if several and not self._later and not learner.optimizer.divided else None
        )
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
            batches(),
            steps=steps,
            lr=lr,
            on_step=lambda step, loss: self._say("taught", step, loss),
        )

    def update(self, version: int, drafter: Copy | None) -> tuple[int, str]:
        """The weights have changed. Returns what all members must agree on."""
        self.draft_with(drafter)
        self._hand_out()
        before = self._local.version
        self._local.update(version)
        self._hand_out(before)  # what was cut was written by the weights before
        alone = self._learner.team.size == 1  # there is nothing to compare with
        return self._learner.version, "" if alone else self._checksum(self._learner.trained())

    def stats(self) -> dict[str, float]:
        found = self._local.stats()
        if self._drafter is not None:
            found["draft/failures"] += self._drafter.failures
            found |= {"draft/idle_seconds": self._idle, "draft/used_seconds": self._used}
        self._idle = self._used = 0.0
        return found

    def learnt(self) -> Copy | None:
        return self._guard(lambda drafter: drafter.learnt())

    def draft_with(self, merged: Copy | None) -> None:
        if merged is not None:
            self._guard(lambda drafter: drafter.draft_with(merged))

    def drafter(self) -> tuple[Copy, dict[str, bytes]]:
        assert self._drafter is not None
        return self._drafter.whole()

    def state_dict(self) -> dict[str, Any]:
        self._hand_out()
        return self._local.state_dict()

    def load_state(self, state: Mapping[str, Any], prompts: Mapping[str, Sequence[int]]) -> None:
        self._prompts.known = prompts
        self._local.load_state_dict(state)

    def hand_over(self) -> dict[str, Any]:
        """Give up what is under way: others go on with it."""
        state = self.state_dict()
        self._local.drop()
        return state

    def take_on(self, state: Mapping[str, Any], prompts: Mapping[str, Sequence[int]]) -> None:
        """Go on with what another has given up."""
        self._prompts.known = prompts
        self._local.take_on(state)

    def can(self) -> frozenset[str]:
        return self._local.can

    def learner_state(self) -> dict[str, Any]:
        return self._learner.state_dict()

    def write(self, folder: str) -> None:
        self._learner.write(Path(folder))

    def write_together(self, folder: str) -> None:
        """The first member writes what all have: masters and moments, at least, are divided among them."""
        learner = self._learner
        team = self._learner.team
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
        """Obey until the driver ends, and decode meanwhile. Without requests the drafter is trained, a micro-batch at a
        time, so that a request waits for one of them at most."""
        said = False
        while True:
            if self.leaving and not said:
                said = True
                self._say("leaving")
            busy = self._engine is not None and self._engine.busy
            spare = not busy and self._drafter is not None and self._drafter.left > 0
            begun = time.perf_counter()
            told = self._next(0.0 if busy or spare else ALIVE_S)
            if told is None and spare:
                self._guard(lambda drafter: drafter.practise())
                self._used += time.perf_counter() - begun
            if not busy:
                self._idle += time.perf_counter() - begun
            if told is not None:
                self._obey(*told)
            elif self._engine is not None and busy:
                self._engine.step()
                self._hand_out()

    def _guard(self, work: Callable[[AdaptiveDrafter], T]) -> T | None:
        """Work for the drafter, if there is one. No token depends on it, so a failure only ends its lessons."""
        if self._drafter is None:
            return None
        try:
            return work(self._drafter)
        except Exception as error:
            self._say("note", self._drafter.give_up(error))
            return None

    def _obey(self, serial: int, name: str, args: Sequence[Any]) -> None:
        if name == "leave":
            raise Gone
        try:
            value = getattr(self if hasattr(self, name) else self._local, name)(*args)
        except Gone:
            raise
        except Exception as error:
            kind = Unmet if is_unmet(error) else type(error)
            self._say("failed", serial, kind.__name__, str(error) or repr(error))
        else:
            if name not in ("ask", "take_on"):
                self._say("done", serial, value)
            self._hand_out()

    def _hand_out(self, version: int | None = None) -> None:
        """Send what has finished, with the version of the weights; without any, say now and then that it works."""
        if self._engine is None:
            return
        if found := self._engine.take():
            version = self._engine.version if version is None else version
            tickets, rollouts = zip(*found, strict=True)
            self._say(
                "rollouts", self._engine.pace, version, (tickets, Bundle.of(rollouts)), wait=False
            )
        elif self._engine.busy and time.monotonic() - self._heard > ALIVE_S:
            self._say("alive", self._engine.pace, wait=False)

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
        """Equal where the bits of all tensors are, of weights or of pieces of a parcel: a sum per tensor of its memory,
        read as whole numbers. A sum of 16-bit weights themselves would first copy them into 64 bits each."""
        sums = torch.stack(
            [_as_integers(tensor.detach().reshape(-1).contiguous()).sum() for tensor in tensors]
        )
        return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()


def _as_integers(flat: Tensor) -> Tensor:
    """The memory of a tensor as 64-bit numbers, or as ones of its own size where it is no multiple of them: wherever
    the tensor lies, they are the same."""
    if flat.nbytes % 8:
        return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[flat.itemsize])
    return (flat.clone() if flat.storage_offset() * flat.itemsize % 8 else flat).view(torch.int64)


# ---- memory that two processes share


def place_of(device: torch.device) -> str:
    """The machine, its processes that see each other, and the card, whatever number that has for a process; "" where
    nothing is known to be shared."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        seen = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{machine} {seen} {torch.cuda.get_device_properties(device).uuid if device.type == 'cuda' else 'memory'}"


def make_buffer(size: int, device: torch.device) -> tuple[Tensor, Any]:
    """So many bytes on the device, and a handle for `open_buffer`; None where there is no way. The handle is good as
    long as this process lives and keeps the buffer."""
    if device.type == "cpu" and hasattr(os, "memfd_create"):
        number = os.memfd_create("whet")  # a file without a name, which ends with its last user
        os.ftruncate(number, size)
        path = f"/proc/{os.getpid()}/fd/{number}"
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8), path
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    # the allocator may have memory of a kind that cannot be shared
    with contextlib.suppress(RuntimeError):
        return buffer, reduce_tensor(buffer)[1] if device.type == "cuda" else None
    return buffer, None


def open_buffer(handle: Any, device: torch.device) -> Tensor:
    if isinstance(handle, str):
        return torch.from_file(handle, shared=True, size=os.stat(handle).st_size, dtype=torch.uint8)
    given = [*handle]
    given[6] = device.index or 0  # the card may have another number here
    opened: Tensor = rebuild_cuda_tensor(*given)
    return opened


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGN) * ALIGN


def _cut(buffer: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that lie one behind the other in a buffer."""
    like = list(like)
    starts = itertools.accumulate(map(_room, like), initial=0)
    return [
        buffer[at : at + t.nbytes].view(t.dtype).view(t.shape)
        for at, t in zip(starts, like, strict=False)
    ]


def _from_bytes(data: np.ndarray) -> Tensor:
    """A tensor over these bytes, which are only read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the bytes of Ray's store cannot be written
        return torch.from_numpy(data)


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
