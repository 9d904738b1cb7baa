"""A run by several processes: which it may have, how they are started, and what each of them builds.

`api.py` calls it where `--gpus` is more than 1, or where the recipe has workers in a cluster. The process of the run
keeps the loop, the data, the judges and the folder, and holds no weights; `whet.cluster` has what moves between it and
the others.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pickle
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet import __version__, build, config
from whet.build import Parts
from whet.errors import WhetError
from whet.eval import eval_sets
from whet.resolve import Basis, RunPlan, tiny_skeleton, training_sampling
from whet.run import CONFIG
from whet.tasks.worker import FarWorker, relay
from whet.text import Codec
from whet.watch import Stopwatch

if TYPE_CHECKING:
    from whet.cluster.crew import Crew
    from whet.cluster.member import Built
    from whet.cluster.stations import Benches, Stations
    from whet.cluster.workers import Workers
    from whet.learn.samples import Encode


RAY = "2.60"  # the version of Ray that whet is written for
DIVIDES = (2, 4, 8)  # GPUs of a worker among which vLLM divides a model
SAMPLE = 2**16  # bytes of a file
RESERVE_S = 60.0  # seconds for Ray to keep room that should be free


class Company:
    """What outlives the loss of a learner: the connection to a cluster, and the workers there. say: for the user.
    folder: of the run."""

    def __init__(self, say: Callable[[str], None], folder: Path) -> None:
        self.say, self.folder = say, folder.absolute()
        self.learners: Stations | None = None  # where they are started, again and again
        self.workers: Workers | None = None
        self.benches: Benches | None = None
        self.stack = ExitStack()

    def judges(self, plan: RunPlan) -> Callable[[], FarWorker]:
        """What starts judges on the nodes of the workers. They are not asked for before the cluster is there."""
        from whet.cluster.stations import Benches

        if self.benches is None:
            attend = partial(relay, plan.problems.judges, plan.settings.judge.memory_mb)
            try:
                self.benches = Benches(attend, plan.settings.cluster.timeout_s)
            except (TypeError, pickle.PicklingError) as error:
                raise WhetError(
                    f'judge.where = "workers", but a judge cannot be sent to them: {error}.'
                ) from error
            self.stack.callback(self.benches.end)
        dial = self.benches.dial
        return lambda: FarWorker(*dial())

    def close(self) -> None:
        self.stack.close()


def build_fleet_parts(
    plan: RunPlan, gpus: int, company: Company, weights: Path | None = None
) -> Parts:
    """The parts of a run whose model is held by `gpus` processes, with a GPU or a share of the cores each, or by the
    actors of a cluster."""
    from whet.cluster.fleet import Chorus, Fleet

    assert plan.curriculum is not None
    settings = plan.settings
    watch = Stopwatch()
    order = {
        "settings": settings.model_dump_json(),
        "weights": str(weights.absolute()) if weights else "",
        "alphabet": plan.problems.alphabet,
        "later": settings.learn.shard == "full",
    }
    with ExitStack() as stack:
        far = settings.judge.where == "workers"
        if not far:
            stack.callback((judge := build.build_judge(plan)).close)
        crew, decoding, what = build_crews(plan, gpus, order, stack, company)
        if far:
            stack.callback((judge := build.build_judge(plan, company.judges(plan))).close)
        engine = Fleet(
            decoding, plan.encoded, slots=settings.rollout.slots, mode=settings.rollout.mode
        )
        if "eagle" in settings.draft.drafters and settings.rollout.engine == "native":
            from whet.draft.training import SpotDrafter

            engine.spot = SpotDrafter(decoding)
        ready = f"Ready after {watch.without():.0f} s: {what}."
        parts = Parts(
            plan=plan,
            model=None,
            engine=engine,
            judge=judge,
            evals=eval_sets(settings, plan.problems.evals, training_sampling(settings, plan.codec)),
            notes=(ready, *engine.notes()),
            learner=Chorus(crew, plan.encoded),
            curriculum=plan.curriculum,
            crew=crew,
            spot=engine.spot,
        )
        build.refuse_unmet(parts)
        stack.pop_all()
    return parts


def build_crews(
    plan: RunPlan, gpus: int, order: Mapping[str, Any], stack: ExitStack, company: Company
) -> tuple[Crew, Crew, str]:
    """The processes that train, those that decode, which may be the same, and what there is in words."""
    from whet.cluster.crew import Crew

    cluster = plan.settings.cluster
    divided = plan.settings.learn.shard != "none"
    if not cluster.workers:
        crew = Crew(order, *member_environments(plan, gpus), divided=divided)
        stack.callback(crew.close)
        many, each = ("1 process", "") if gpus == 1 else (f"{gpus} processes", " each")
        return crew, crew, f"{many} with a model, an engine and a learner{each}"
    theirs = address if (address := os.environ.get("RAY_ADDRESS", "")) != "local" else ""
    if not theirs:  # read when Ray is loaded; else its ports are open to the network
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    from whet.cluster.stations import Stations, join_cluster
    from whet.cluster.workers import Workers

    name = plan.settings.model.name
    run = str(company.folder)
    order = {**order, "run": run, "alike": kit(name, run)}
    company.stack.callback(join_cluster(max(available_cores(), cluster.workers + gpus), theirs))
    backend = backend_of(plan)
    cuda = backend == "nccl"
    patience = cluster.timeout_s if theirs else 0.0  # no node joins a cluster of our own
    colocated = cluster.placement == "colocated"
    environment = shared_environment(cluster.workers + (0 if colocated else gpus))
    decoding = {"CPU": 1.0} | ({"GPU": cluster.gpus_per_worker} if cuda else {})
    if colocated:
        stations = Stations(build_member, environment, decoding)
        stations.await_room(cluster.workers, "workers", patience, company.say)
        crew = Crew(order, [{}] * cluster.workers, backend, divided=divided, start=stations.start)
        stack.callback(crew.close)
        return crew, crew, f"{cluster.workers} actors with a model, an engine and a learner each"
    learning = {"CPU": 1.0} | ({"GPU": min(1.0, cluster.gpus_per_worker)} if cuda else {})
    stations = Stations(build_member, environment, decoding, beside=[learning] * gpus)
    first = not company.learners
    company.learners = company.learners or Stations(build_member, environment, learning)
    # again, since its node may be gone for good
    company.learners.await_room(gpus, "learners", patience, company.say)
    if first:
        stations.await_room(cluster.min_workers, "workers", patience, company.say)
        company.stack.callback(company.learners.free)
        company.learners.reserve(gpus, max(patience, RESERVE_S))
    start = company.learners.start
    crew = Crew({**order, "role": "learner"}, [{}] * gpus, backend, divided=divided, start=start)
    stack.callback(crew.close)
    if company.workers is None:
        # Weights come from the learner: a checkpoint may be gone by then.
        company.workers = Workers(
            {
                **order,
                "role": "worker",
                "weights": "",
                "later": False,
                "run": "",
                "alike": kit(name, ""),
            },
            stations,
            crew,
            workers=cluster.workers,
            least=cluster.min_workers,
            timeout_s=cluster.timeout_s,
        )
        company.workers.on_message = company.say
        company.stack.callback(company.workers.end)
    else:
        company.workers.follow(crew)
    return (
        crew,
        company.workers,
        f"{len(company.workers.present)} actors that decode and {gpus} that learn",
    )


def check_gpus(settings: config.Config, gpus: int) -> None:
    """Refuse a number of processes that this machine or this recipe cannot have."""
    workers = settings.cluster.workers
    if settings.judge.where == "workers" and not workers:
        raise WhetError(
            'judge.where = "workers" needs workers in a cluster: set cluster.workers, or leave it out.'
        )
    if gpus == 1 and not workers and settings.learn.shard != "full":
        return
    if settings.learn.shard == "full" and settings.rollout.engine == "vllm":
        raise WhetError(
            'rollout.engine = "vllm" cannot decode beside learn.shard = "full"; use "native".'
        )
    if workers:
        refuse_cluster(settings.cluster, gpus, settings.rollout.engine)
        return
    # not before: a run with one process waits seconds for it, and finds wrong data first
    import torch

    from whet.model.load import pick_device

    if pick_device(settings.model).type == "cuda":
        if gpus > (there := torch.cuda.device_count()):
            raise WhetError(
                f"--gpus {gpus} is more than the {there} GPU{'s' * (there > 1)} that torch sees here."
            )
    elif settings.model.device != "cpu" and gpus > 1:
        raise WhetError(
            f'--gpus {gpus}, but torch sees no GPU; model.device = "cpu" divides the cores instead.'
        )


def refuse_cluster(cluster: config.Cluster, gpus: int, engine: str) -> None:
    """Refuse a cluster that cannot be, before anything is started."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if not version.startswith(f"{RAY}."):
        there = (
            f"Ray {version} is installed, and whet runs with {RAY}"
            if version
            else "Ray is not installed"
        )
        raise WhetError(
            f"cluster.workers = {cluster.workers}, but {there}: pip install 'whet[ray]'."
        )
    if cluster.min_workers > cluster.workers:
        few = f"cluster.workers = {cluster.workers}"
        raise WhetError(f"cluster.min_workers = {cluster.min_workers} is more than {few}.")
    if cluster.placement == "colocated" and gpus > 1:
        raise WhetError(
            f'cluster.placement = "colocated" trains in each of its {cluster.workers} workers: leave out --gpus {gpus}.'
        )
    cards = cluster.gpus_per_worker
    unfit = engine == "native" or cluster.placement == "colocated"
    if cards > 1 and (unfit or cards not in DIVIDES):
        can = 'only rollout.engine = "vllm" can divide a model among 2, 4 or 8 GPUs, apart from the learners'
        raise WhetError(
            f"cluster.gpus_per_worker = {cards:g} is more than a worker can use here: {can}."
        )


def backend_of(plan: RunPlan) -> str:
    """How processes exchange gradients."""
    return "nccl" if plan.footprint.device.type == "cuda" else "gloo"


def member_environments(plan: RunPlan, gpus: int) -> tuple[list[dict[str, str]], str]:
    """The environment of each process, with its own GPU or its share of the cores, and how they exchange gradients."""
    import torch

    backend = backend_of(plan)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
        map(str, range(torch.cuda.device_count()))
    )
    own = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **shared_environment(gpus),
    }
    cards = (
        [{"CUDA_VISIBLE_DEVICES": card} for card in seen.split(",")]
        if backend == "nccl"
        else [{}] * gpus
    )
    return [own | cards[number] for number in range(gpus)], backend


def shared_environment(count: int) -> dict[str, str]:
    """What is the same for so many processes of a run, which divide the cores."""
    own = {"OMP_NUM_THREADS": str(max(1, available_cores() // count))}
    # else gloo asks which address the host's name has, and not every host has one
    if sys.platform == "linux":
        own["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: os.environ.get(name, value) for name, value in own.items()}


def kit(model: str, run: str) -> dict[str, str]:
    """What the nodes of a cluster must have alike, by its name. Of long files it takes the ends. run: the folder, or
    nothing where only the driver and the learners need it."""

    def digest(files: Iterable[Path]) -> str:
        found = hashlib.sha256()
        for path in sorted(files):
            with path.open("rb") as file:
                found.update(
                    f"{path.name} {(size := path.stat().st_size)} ".encode() + file.read(SAMPLE)
                )
                file.seek(max(0, size - SAMPLE))
                found.update(file.read())
        return found.hexdigest()[:12]

    source = Path(__file__).parent.rglob("*.py")
    alike = {"Python": platform.python_version(), "Ray": importlib.metadata.version("ray")}
    alike["whet"] = f"{__version__} ({digest(source)})"
    if (folder := Path(model)).is_dir():
        alike[f"model folder {model}"] = digest(
            p for p in folder.iterdir() if p.suffix in (".json", ".safetensors")
        )
    if run and (path := Path(run) / CONFIG).exists():
        alike[f"run folder {run}"] = digest([path])
    return alike


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def serve_member(handle: int, parent: int) -> None:
    """The program of a process of `build_fleet_parts`."""
    from whet.cluster.member import run_member

    run_member(handle, parent, build_member)


def build_member(order: Mapping[str, Any], encode: Encode) -> Built:
    """What a process without data builds of a run: the model, and by its role an engine, what makes a learner, or
    both; and with an engine the drafter that learns."""
    from whet.model.load import check_model, eos_of, load_tokenizer, pick_device
    from whet.model.memory import limit_memory

    settings = config.Config.model_validate_json(order["settings"])
    here = kit(settings.model.name, order["run"]) if "alike" in order else {}
    for name, value in order.get("alike", {}).items():
        if (own := here.get(name, "missing")) != value:
            raise WhetError(
                f"its {name} is {own}, and the driver's is {value}; all nodes need the same."
            )
    codec = Codec(
        load_tokenizer(settings.model, order["alphabet"]), eos_of(settings.model), settings.text
    )
    network = check_model(settings.model) or tiny_skeleton(settings)
    role = order.get("role", "both")
    shares = order["size"]
    several = role == "worker" and pick_device(settings.model).type == "cuda"
    # it may be a share of one
    cards = max(1, int(settings.cluster.gpus_per_worker)) if several else 1
    if cards > 1:  # vLLM's processes have the GPUs
        settings = settings.model_copy(
            update={"model": settings.model.model_copy(update={"device": "cpu"})}
        )
    of_gpu = min(1.0, settings.cluster.gpus_per_worker) if settings.cluster.workers else 1.0
    given: dict[str, Any] = {"processes": shares, "role": role, "share": of_gpu}
    plan = Basis(settings=settings, codec=codec, encoded=encode, network=network, **given)
    if plan.footprint.device.type == "cuda" and of_gpu < 1.0:
        limit_memory(plan.footprint.device, of_gpu)
    room = plan.room  # measured before the weights are loaded
    model = build.build_model(plan, Path(order["weights"]) if order["weights"] else None)
    drafter = engine = None
    if role != "learner":
        drafter = build.build_drafter(settings, model)
        native = partial(build.build_engine, drafter=drafter)
        vllm = partial(build.build_vllm, cards=cards)
        engine = (vllm if settings.rollout.engine == "vllm" else native)(plan, model, room)
    if role == "worker":
        return model, engine, None, drafter
    if order["later"]:
        from whet.cluster.shards import ShardedLearner

        return (
            model,
            engine,
            partial(build.build_learner, plan, model, engine, ShardedLearner),
            drafter,
        )
    from whet.learn.learner import Learner

    shares = plan.footprint.shares
    share = (order["rank"] if shares > 1 else 0, shares)
    return (
        model,
        engine,
        partial(build.build_learner, plan, model, engine, partial(Learner, share=share)),
        drafter,
    )
