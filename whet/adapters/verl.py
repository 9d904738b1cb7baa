"""A curriculum inside verl 0.9.1, by YAML lines alone (docs/verl.md).

    WhetDataset --ticket, row--> verl's trainer --> WhetWorker --reports--> the desk <--which groups?-- WhetSampler

A Ray actor holds the desk (`desk.py`). The dataset hands out the prompts that it wants, each under a ticket; where
verl asks for more, the row has no ticket and is not generated. The worker generates what the desk orders for a ticket,
the sampler gives verl the groups that train. Only the sampler removes rows from TransferQueue: it runs in the trainer's
thread, as checkpoints do, so a checkpoint has the rows of every group that its desk knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from whet.adapters.desk import Answer, Finished, Order, VerlDesk, facts_of
from whet.errors import WhetError

VERSION = "0.9.1"
NAME = "whet_desk"
with contextlib.suppress(metadata.PackageNotFoundError):
    if (found := metadata.version("verl")) != VERSION:
        raise WhetError(
            f"whet.adapters.verl works with verl {VERSION} alone, and verl {found} is installed."
        )

try:
    import ray
    import torch
    import transfer_queue as tq
    from omegaconf import DictConfig, OmegaConf
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.utils.tensordict_utils import assign_non_tensor_data

    # an actor class refuses subclasses
    PlainWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__mro__[1]
except (ImportError, AttributeError) as error:
    raise WhetError(
        f"whet.adapters.verl needs verl {VERSION} with its extra verl-core ({error})."
    ) from error

USED = {  # what is overridden or called here, and the names of its parameters
    PlainWorker._run_prompt: "self prompt sampling_params trajectory trace",
    PlainWorker._run_agent_loop: "self sampling_params trajectory agent_name trace kwargs",
    PlainWorker._agent_loop_postprocess: "self output validate kwargs",
    AgentLoopManagerTQ.generate_sequences: "self prompts",
    ReplayBufferAsync.sample: "self global_steps partition_id batch_size",
    ReplayBufferAsync._clear_groups: "self partition_id uids",
    ReplayBufferAsync._sync_metadata_from_transfer_queue: "self",
    RLHFDataset.__init__: "self data_files tokenizer config processor max_samples",
    RLHFDataset.__getitem__: "self item",
    find_latest_ckpt_path: "path directory_format",
}
for call, names in USED.items():
    # Ray's own
    if [
        name for name in inspect.signature(call).parameters if name != "_ray_trace_ctx"
    ] != names.split():
        raise WhetError(
            f"{call.__qualname__} has other parameters than in verl {VERSION}; install that version."
        )

WANTED: dict[str, Any] = {  # settings without which a part would be bypassed
    "trainer.v1.trainer_mode": "colocate_async",
    "trainer.v1.sampler.custom_sampler": {
        "path": "pkg://whet.adapters.verl",
        "name": "WhetSampler",
    },
    "data.custom_cls": {"path": "pkg://whet.adapters.verl", "name": "WhetDataset"},
    "data.dataloader_num_workers": 0,  # a worker process would fetch prompts ahead of the desk
    "algorithm.filter_groups.enable": False,  # the curriculum decides
    "skip.rollout_tq.enable": False,
}
POLL = 0.1  # seconds between the sampler's questions
RIGHT = 0.5  # a reward above it, or an "acc" of the reward function above it, is a right answer


def told(reference: Any) -> Any:
    """What an actor answers; a WhetError comes as its plain sentence."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, WhetError):
            raise type(error.cause)(str(error.cause)) from None
        raise


def desk_actor() -> Any:
    try:
        return ray.get_actor(NAME)
    except ValueError:
        raise WhetError(
            "There is no desk: data.custom_cls must name whet.adapters.verl's WhetDataset."
        ) from None


class WhetDataset(RLHFDataset):
    """verl's dataset; the one of the training files hands out what the desk wants, whatever row is asked for."""

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ):
        super().__init__(data_files, tokenizer, config, processor, max_samples)
        files, training = (
            [f] if isinstance(f, str) else list(f) for f in (data_files, config.train_files)
        )
        self.desk: Any = None
        # a second one of these files validates
        if files == training and NAME not in ray.util.list_named_actors():
            if "__rollout_n__" in self.dataframe.column_names:
                raise WhetError(
                    "The curriculum decides how many rollouts a prompt gets; remove __rollout_n__."
                )
            table = self.dataframe
            names = ("extra_info", "data_source", self.prompt_key)
            facts = facts_of(
                *(list(table[n]) if n in table.column_names else [None] * len(self) for n in names)
            )
            self.row_of = {prompt_id: row for row, prompt_id in enumerate(facts.ids)}
            self.desk = ray.remote(num_cpus=0)(VerlDesk).options(name=NAME).remote(facts)

    def __getitem__(self, item: int) -> dict[str, Any]:
        if self.desk is None:
            return super().__getitem__(item)
        ticket, prompt_id = told(self.desk.hand_out.remote())
        return {**super().__getitem__(self.row_of.get(prompt_id, 0)), "ticket": ticket}

    def state_dict(self) -> dict[str, Any]:
        """For data.pt, which verl writes into a checkpoint before it calls it complete."""
        return {NAME: told(self.desk.state.remote())} if self.desk is not None else {}

    def load_state_dict(self, state: Any) -> None:
        """WhetManager has loaded it: verl's loader would do so only after groups in work were begun again."""


class WhetWorker(PlainWorker):
    """Runs the agent loops of a prompt as the desk orders them."""

    def __init__(self, *args: Any, **kwargs: Any):
        # Ray would copy verl's constructor, and its super() would miss this class
        super().__init__(*args, **kwargs)

    async def _run_prompt(
        self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False
    ) -> None:
        if trajectory["validate"]:
            return await super()._run_prompt(prompt, sampling_params, trajectory, trace)
        desk = desk_actor()
        ticket = prompt.pop("ticket")
        try:
            # The desk hears of the uid first, so that the sampler does not clear it. The status is "finished" because
            # verl would generate a "running" group anew after a restart; the desk knows what it lacks.
            answer = (
                await desk.start.remote(ticket, prompt["uid"]) if ticket else Answer(what="over")
            )
            await tq.async_kv_put(
                key=prompt["uid"], partition_id="train", tag={"status": "finished"}
            )
            pause = POLL
            while answer.what != "over":
                if (order := answer.order) is None:
                    await asyncio.sleep(pause)
                    pause, answer = min(2.0, 2 * pause), await desk.ask.remote(ticket)
                else:
                    pause, given = POLL, {**sampling_params, "max_tokens": order.limit}
                    runs = (
                        self._session(given, order, i, prompt, trajectory, trace)
                        for i in order.indices
                    )
                    answer = await desk.report.remote(await asyncio.gather(*runs))
        except Exception as error:  # the trainer hears of it, through the sampler
            cause = getattr(error, "cause", error)
            await desk.fail.remote(
                str(cause) if isinstance(cause, WhetError) else f"A worker failed with {cause!r}."
            )
            raise

    async def _session(
        self, sampling: dict, order: Order, index: int, *about_prompt: Any
    ) -> Finished:
        """One rollout; an agent loop that fails has no verdict."""
        prompt, trajectory, trace = about_prompt
        about: dict[str, Any] = {"uid": order.uid, "index": index}
        try:
            outputs = await self._run_agent_loop(
                sampling, trajectory, trace=trace, session_id=index, **prompt
            )
        except Exception:
            logging.getLogger(__name__).exception(
                "Session %d of prompt %s failed.", index, order.prompt_id
            )
            outputs = []
        if not outputs or (reward := outputs[-1].reward_score) is None:
            return Finished(**about, length=0, verdict="unjudged")
        extra = outputs[-1].extra_fields
        length = sum(sum(output.response_mask) for output in outputs)
        right = float(extra.get("reward_extra_info", {}).get("acc", reward)) > RIGHT
        return Finished(
            **about,
            length=length,
            verdict="right" if right else "wrong",
            reward=float(reward),
            finish="length" if length >= order.limit else "stop",
            first_version=extra.get("min_global_steps"),
            last_version=extra.get("max_global_steps"),
        )

    async def _agent_loop_postprocess(
        self, output: Any, validate: bool, **kwargs: Any
    ) -> list[Any]:
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        return output if isinstance(output, list) else [output]


class WhetManager(AgentLoopManagerTQ):
    """Checks the configuration, opens the desk and, after a restart, begins again what was in work."""

    def __init__(self, config: DictConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        for name, value in WANTED.items():
            if (found := OmegaConf.select(config, name)) != value:
                raise WhetError(f"A curriculum in verl needs {name} = {value}, not {found}.")
        if self.reward_loop_worker_handles is None:
            raise WhetError(
                "A reward model must have reward.reward_model.enable_resource_pool = True."
            )
        self.agent_loop_workers_class = ray.remote(WhetWorker)
        self.desk = desk_actor()
        told(
            self.desk.open.remote(
                OmegaConf.to_container(config, resolve=True), saved_state(config.trainer)
            )
        )

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> WhetManager:
        manager: WhetManager = super().create(*args, **kwargs)
        listed: dict[str, Any] = tq.kv_list("train").get("train", {})
        left, known = told(manager.desk.unfinished.remote())
        # verl begins what is pending
        begun = [key for key, tag in listed.items() if tag.get("status") == "finished"]
        tickets = tq.kv_batch_get(begun, "train", ["ticket"])["ticket"] if begun else ()
        lost = {
            uid: left[ticket] for uid, ticket in zip(begun, tickets, strict=True) if ticket in left
        }
        # of a response: uid, session, output
        parts = [key.split("_") for key in listed if "_" in key]
        if stale := [
            "_".join(p) for p in parts if p[0] not in known or p[1] in map(str, lost.get(p[0], ()))
        ]:
            tq.kv_clear(stale, "train")  # they were trained, or came after the desk was saved
        if lost:
            rows = tq.kv_batch_get(list(lost), "train")
            assign_non_tensor_data(
                rows, "global_steps", max(listed[uid]["global_steps"] for uid in begun)
            )
            manager.generate_sequences(rows)
        return manager


def saved_state(trainer: Any) -> Mapping[str, Any] | None:
    """The desk's state in the checkpoint from which verl resumes, which verl finds by the same rule."""
    if trainer.resume_mode == "disable":
        return None
    folder = trainer.resume_from_path
    if (
        trainer.resume_mode == "auto"
        and (folder := find_latest_ckpt_path(trainer.default_local_dir)) is None
    ):
        return None
    path = os.path.join(folder, "data.pt")
    loader = torch.load(path, weights_only=True) if os.path.exists(path) else {}
    state = (loader.get("dataset_state") or {}).get(NAME)
    if state is None:
        raise WhetError(
            f"The checkpoint {folder} has no curriculum; resume it without whet, or start a new run."
        )
    return state


class WhetSampler(ReplayBufferAsync):
    """Gives verl the groups that the curriculum emits, and lets it fetch the prompts that the desk wants."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict]:
        if partition_id != "train":
            return super().sample(global_steps, partition_id, batch_size)
        desk = desk_actor()
        while (taken := told(desk.take.remote(global_steps))) is None:
            if wanted := told(desk.wanted.remote()):
                self.refill_fn(wanted)
            else:
                time.sleep(POLL)
        trained, metrics = taken
        self._sync_metadata_from_transfer_queue()
        # asked after TransferQueue: what is begun in between is not in its list
        known = told(desk.known.remote())
        found = {key: key.rsplit("_", 2) for key in self.partitions["train"]}
        keys = [
            key for key, (uid, session, _) in found.items() if int(session) in trained.get(uid, ())
        ]
        missing = sum(map(len, trained.values())) - len({tuple(found[key][:2]) for key in keys})
        assert missing == 0, f"TransferQueue lost {missing} rollouts"
        batch = tq.KVBatchMeta(
            partition_id="train", keys=keys, tags=[self.partitions["train"][key] for key in keys]
        )
        rest = [key for key, (uid, *_) in found.items() if uid in trained and key not in set(keys)]
        tq.kv_clear(keys=[*trained, *rest], partition_id="train")
        self._clear_groups("train", self.finished_keys["train"] - known - trained.keys())
        return batch, metrics
