"""Members that are Ray actors, anywhere in a cluster.

Ray places them, says that they are gone, and carries weights; `crew.py` talks to them over the same channels as to
processes of its own machine. A station listens on the address of its node for one connection, which must begin with
the secret of this run: what comes over a channel is unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray._private.state import state
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from whet.cluster.channel import Channel
from whet.cluster.crew import LEAVE_S, Hand, shortened
from whet.cluster.member import Build, FleetMember, Gone
from whet.cluster.ranks import Unmet, open_store
from whet.cluster.workers import Need, places
from whet.errors import WhetError

SECRET = 32  # bytes
LOOPBACK = "127.0.0.1"
KILL_S = 0.5  # seconds for a process of this machine to end once Ray has killed it
LOOK_S = 1.0  # seconds between two looks at which nodes are drained


class Listener:
    """An actor that takes connections which begin with the secret. Ray runs each call in a thread of its own."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        host = ray.util.get_node_ip_address()
        self._listener = socket.create_server((host, 0))
        self._where = (
            *self._listener.getsockname()[:2],
            os.getpid(),
            ray.get_runtime_context().get_node_id(),
        )

    def where(self) -> tuple[str, int, int, str]:
        """Address and port on which it listens, its process, and what Ray calls its node."""
        return self._where

    def _accept(self) -> socket.socket:
        while True:
            end, _ = self._listener.accept()
            end.settimeout(LEAVE_S)
            with contextlib.suppress(OSError):
                if hmac.compare_digest(_receive(end, SECRET), self._secret):
                    end.settimeout(None)
                    return end
            end.close()


class Bench(Listener):
    """The actor that judges start from: each connection is given to `attend`."""

    def __init__(self, secret: bytes, path: Sequence[str], attend: bytes) -> None:
        super().__init__(secret)
        # where the driver has found its judges
        sys.path.extend(place for place in path if place not in sys.path)
        threading.Thread(
            target=self._serve, args=[ray.cloudpickle.loads(attend)], daemon=True
        ).start()

    def _serve(self, attend: Callable[[socket.socket], None]) -> None:
        while True:
            with contextlib.suppress(OSError):  # it is closed then, and the driver goes elsewhere
                attend(self._accept())


class Station(Listener):
    """The actor: the program of a member, and a window for weights."""

    def __init__(self, secret: bytes, build: Build, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        super().__init__(secret)
        if environment.get("GLOO_SOCKET_IFNAME") == "lo":  # other nodes reach this one by another
            # Ray has its own, which is found once Ray is loaded
            psutil = importlib.import_module("psutil")
            names = {
                address.address: name
                for name, own in psutil.net_if_addrs().items()
                for address in own
            }
            os.environ["GLOO_SOCKET_IFNAME"] = names.get(self._where[0], "lo")
        self._build = build
        self._member: FleetMember | None = None
        signal.signal(signal.SIGTERM, self._leave)

    def _leave(self, *signalled: Any) -> None:
        if self._member is None:
            os._exit(0)
        self._member.leaving = True  # it tells the driver, which gives others what it has

    def _built(self, *given: Any) -> Any:
        try:
            return self._build(*given)
        except WhetError as error:
            raise WhetError(f"Node {self._where[0]}: {error}") from error

    def serve(self) -> None:
        """Take the first connection that knows the secret, and obey it until it ends."""
        with self._listener:
            end = self._accept()
        # closed if it fails, too
        with contextlib.closing(Channel(end)) as channel, contextlib.suppress(Gone):
            self._member = FleetMember(channel, self._built)
            self._member.serve()

    def fetch(self) -> list[Any]:
        """The weights that the learner here has packed, in the store of this node: Ray keeps them once per node."""
        assert self._member is not None and self._member.parcel is not None
        parcel = self._member.parcel
        return [ray.put(parcel._replace(data=parcel.data.cpu().numpy()))]

    def cross(self, *what: Any) -> bool:
        """Exchange weights from card to card. Returns whether that was done."""
        assert self._member is not None
        with contextlib.suppress(Unmet):
            self._member.cross(*what)
            return True
        return False

    def deliver(self, parcel: Any) -> None:
        """Weights for the engine here. Ray has brought them to this node before it calls."""
        assert self._member is not None
        self._member.brought = parcel


def _receive(end: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size and (more := end.recv(size - len(got))):
        got += more
    return got


class Dialled(Channel):
    """A channel to a station that may not have been placed yet. What is sent before that waits."""

    def __init__(self, actor: Any, secret: bytes) -> None:
        self._actor = actor
        self._secret = secret
        self._asked = actor.where.remote()
        self.served: Any = None  # the call that lasts as long as its member
        self.why = "closed its channel"
        self.pid = 0
        self.host = ""
        self.node = ""
        # An unconnected end, so that it can be closed like any other.
        super().__init__(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))

    def ready(self) -> bool:
        if self._asked is None or self.closed:
            return True
        if not ray.wait([self._asked], timeout=0.0)[0]:
            return False
        try:
            self.host, port, self.pid, self.node = ray.get(self._asked)
            end = socket.create_connection((self.host, port), timeout=LEAVE_S)
            self.served = self._actor.serve.remote()
            end.sendall(self._secret)
        except (ray.exceptions.RayError, OSError) as error:
            self.why, self.closed = f"cannot be reached at {self.host}: {error}", True
            return True
        finally:
            self._asked = None
        self.end.close()
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setblocking(False)
        self.end, self.reached = end, time.monotonic()
        self.write()
        return True

    def write(self) -> None:
        if self._asked is None:
            super().write()


class ActorHand(Hand):
    """A place in the crew whose process is an actor."""

    def __init__(self, number: int, name: str, actor: Any, secret: bytes) -> None:
        self.actor, self.dialled = actor, Dialled(actor, secret)
        super().__init__(number, name, self.dialled)

    def ended(self) -> str:
        try:
            ray.get(self.dialled.served or self.actor.where.remote(), timeout=LEAVE_S)
        except ray.exceptions.GetTimeoutError:
            return "fell silent"
        except ray.exceptions.RayError as error:
            return f"was lost: {_told(error)}"
        return self.dialled.why

    def stop(self) -> None:
        self.channel.close()
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self.actor)
        if self.dialled.host and self.dialled.host == ray.util.get_node_ip_address():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                until = time.monotonic() + KILL_S
                while time.monotonic() < until:
                    os.kill(self.dialled.pid, 0)
                    time.sleep(0.05)
                os.kill(self.dialled.pid, signal.SIGKILL)  # one that is stopped does not hear Ray


def _told(error: Exception) -> str:
    text = repr(cause) if (cause := getattr(error, "cause", None)) else str(error) or repr(error)
    return shortened(re.sub(r"\x1b\[[\d;]*m", "", text)).rstrip(".")


class Stations:
    """Starts actors that `need` so much of a node each, beside others that need theirs, and carries weights."""

    actor: type[Station] = Station

    def __init__(
        self, build: Build, environment: Mapping[str, str], need: Need, beside: Sequence[Need] = ()
    ) -> None:
        self.secret = secrets.token_bytes(SECRET)
        self.build = build
        self.environment = environment
        self.need = need
        self.beside = beside
        asked = {"num_cpus": need["CPU"], "num_gpus": need.get("GPU", 0)}
        self.kind = ray.remote(**asked, max_restarts=0, max_concurrency=16)(self.actor)
        self._group: Any = None
        self.apart: set[int] = set()  # the workers that cannot open the memory of the learner
        # whether weights may go from card to card; several share no copy
        self.cards = 0 < need.get("GPU", 0) <= 1
        self._store: Any = None  # where the two of a pair find each other, and its address
        self._unmet: set[int] = set()  # the workers that weights did not reach so
        self._looked = 0.0

    def places(self, most: int) -> int:
        return places(
            [node["Resources"] for node in ray.nodes() if node["Alive"]],
            self.need,
            most,
            self.beside,
        )

    def await_room(self, count: int, what: str, seconds: float, say: Callable[[str], None]) -> None:
        """Raise where the cluster has no room for so many of them, and gets none in time."""
        until = time.monotonic() + seconds
        while (there := self.places(count)) < count:
            total = ray.cluster_resources()
            has = f"it has {total.get('CPU', 0):g} CPUs and {total.get('GPU', 0):g} GPUs"
            each = " and ".join(f"{number:g} {kind}" for kind, number in self.need.items())
            few = f"The cluster has room for {there} of {count} {what} with {each} each"
            few += f" beside {len(self.beside)} learners" * bool(self.beside)
            if time.monotonic() >= until:
                raise WhetError(f"{few}: {has}.")
            if seconds:
                say(f"{few}: {has}. The run waits for more, {seconds:g} s at most.")
            seconds = 0.0  # said once
            time.sleep(min(1.0, max(0.0, until - time.monotonic())))

    def reserve(self, count: int, seconds: float) -> None:
        """Keep room for so many, by their numbers: one that is started again must not wait behind others in a queue."""
        group = self._group = placement_group([dict(self.need)] * count)
        if not group.wait(seconds):
            self.free()
            raise WhetError(
                f"Others use the cluster: no room for {count} learners was free within {seconds:g} s."
            )

    def free(self) -> None:
        if self._group is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                remove_placement_group(self._group)

    def start(self, number: int, name: str) -> ActorHand:
        kind = self.kind
        if self._group is not None:
            kind = kind.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, number)
            )
        return ActorHand(
            number, name, kind.remote(self.secret, self.build, self.environment), self.secret
        )

    def cross(self, source: Any, worker: Any, *what: Any) -> list[Any]:
        """Begin to send what `source` has packed from its card to that of a worker; nothing where there is no way."""
        if not self.cards or worker.number in self._unmet:
            return []
        self._store = self._store or open_store(ray.util.get_node_ip_address())
        name = " ".join(hand.actor._actor_id.hex() for hand in (source, worker))
        return [
            hand.actor.cross.remote(worker.number, name, self._store[1], *what)
            for hand in (worker, source)
        ]

    def send(self, parcel: Any, worker: Any) -> list[Any]:
        """Begin to carry what was fetched to a worker."""
        return [worker.actor.deliver.remote(parcel)]

    def fetch(self, source: Any, seconds: float) -> Any:
        """What `source` has packed, as something that can be sent. The source may turn out to be lost."""
        try:
            return ray.get(source.actor.fetch.remote(), timeout=seconds)[0]
        except (ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError) as error:
            full = "The object store of the learner's node has no room for the weights, nor has its disk"
            raise WhetError(
                f"{full}: {_told(error)}; --resume goes on from the last checkpoint."
            ) from error
        except ray.exceptions.RayError as error:
            source.lose(f"did not hand out its weights within {seconds:g} s: {_told(error)}")
            return None

    def look(self, workers: Sequence[Hand]) -> None:
        """Note which workers must leave, since their nodes are drained."""
        if time.monotonic() - self._looked > LOOK_S:
            drained = state.get_draining_nodes()
            self._looked = time.monotonic()
            for hand in workers:
                hand.leaving |= isinstance(hand, ActorHand) and hand.dialled.node in drained

    def arrived(self, sending: list[Any], source: Hand, worker: Hand) -> bool:
        """Whether a sending has ended. Where it failed, the worker or the source is lost, or there is no such way."""
        ended, under_way = ray.wait(sending, num_returns=len(sending), timeout=0.0)
        for call in ended:
            try:
                if ray.get(call) is False:
                    self._unmet.add(worker.number)
                    return True  # and the worker will say that it has got nothing
            except ray.exceptions.RayActorError as error:
                hand, did = (
                    (worker, "got the") if call == sending[0] else (source, "handed out its")
                )
                hand.lose(f"was lost while it {did} weights: {_told(error)}")
            except ray.exceptions.RayError as error:  # the weights are gone, and not the worker
                source.lose(f"was lost while it handed out its weights: {_told(error)}")
        return not under_way or bool(worker.lost or source.lost)


class Benches:
    """An actor for judges on each node but the driver's, or there if it is the only one. Ray starts lost ones again."""

    def __init__(self, attend: Callable[[socket.socket], None], seconds: float) -> None:
        self.secret, self.seconds, packed = (
            secrets.token_bytes(SECRET),
            seconds,
            ray.cloudpickle.dumps(attend),
        )
        own = ray.get_runtime_context().get_node_id()
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        kind = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=4)(Bench)
        self.actors = deque[Any]()
        for node in [node for node in nodes if node != own] or [own]:
            there = kind.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True)
            )
            self.actors.append(there.remote(self.secret, sys.path, packed))

    def dial(self) -> tuple[socket.socket, Callable[[], bool]]:
        """A connection to the next one, and what says that it is gone. Raises OSError where none answers."""
        why = ""
        until = time.monotonic() + self.seconds
        while self.actors and time.monotonic() < until:
            self.actors.rotate()
            actor = self.actors[0]
            try:
                found = ray.get(actor.where.remote(), timeout=LEAVE_S)
                end = socket.create_connection(found[:2], timeout=LEAVE_S)
                end.sendall(self.secret)
            except (ray.exceptions.RayError, OSError) as error:
                # the cause of what an actor met at its start
                why = str(error).strip().splitlines()[-1][:300]
                if isinstance(error, ray.exceptions.ActorDiedError):  # for good
                    self.actors.popleft()
                time.sleep(0.1)
                continue
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return end, partial(self._gone, actor, found)
        raise OSError(f"no node has answered, the last one because {why}")

    @staticmethod
    def _gone(actor: Any, was: tuple[str, int, int, str]) -> bool:
        try:
            return bool(ray.get(actor.where.remote(), timeout=LEAVE_S) != was)
        except ray.exceptions.RayError:
            return True

    def end(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            for actor in self.actors:
                ray.kill(actor)


def join_cluster(cores: int, address: str = "") -> Callable[[], None]:
    """Join the cluster at an address, or start one of this machine that only this machine can reach. Returns what
    leaves it again."""
    if ray.is_initialized():
        return lambda: None
    before = signal.getsignal(signal.SIGTERM)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "ERROR",
        "configure_logging": False,
    }
    try:
        if address:
            # Ray would wait for it for ever
            if found := re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", address):
                socket.create_connection((found[1], int(found[2])), LEAVE_S).close()
            ray.init(address=address, **quiet)
        else:
            # not one that is found here
            own = {"address": "local", "num_cpus": cores, "include_dashboard": False}
            ray.init(**own, _node_ip_address=LOOPBACK, **quiet)
            if ray.util.get_node_ip_address() != LOOPBACK:
                ray.shutdown()
                raise WhetError(
                    "Ray was loaded before whet, and would listen to the network; "
                    "start a cluster and set RAY_ADDRESS, or set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0."
                )
    except (OSError, RuntimeError, ValueError) as error:
        raise WhetError(
            f"Ray does not answer{f' at {address}' * bool(address)}: {_told(error)}"
        ) from error
    finally:
        # Ray has put its own there, if this is the main thread
        with contextlib.suppress(TypeError, ValueError):
            signal.signal(signal.SIGTERM, before)
    return ray.shutdown
