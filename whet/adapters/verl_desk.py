"""The desk that verl's parts share, as `verl.py` puts it into a Ray actor. Nothing here imports verl or Ray."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from whet.adapters.desk import Answer, Desk, Finished
from whet.curriculum.build import Facts, build_curriculum
from whet.errors import WhetError
from whet.recipe import parse_config
from whet.types import Sampling

MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class=whet.adapters.verl.WhetManager"


def facts_of(extra: Sequence[Mapping[str, Any] | None], sources: Sequence[Any], prompts: Sequence[Any]) -> Facts:
    """What verl's rows say: a prompt is named by data_source and extra_info.index, and extra_info.level is its level.

    >>> facts_of([{"index": 7, "level": 2}], ["gsm8k"], [[{"role": "user", "content": "1+1"}]]).ids
    ['gsm8k/7']
    """
    ids, table = dict[str, None](), [row or {} for row in extra]
    for row, (source, about) in enumerate(zip(sources, table, strict=True)):
        if source is None or about.get("index") is None:
            raise WhetError(f"Row {row} of the training data has no data_source or no extra_info.index to name it.")
        if (name := f"{source}/{about['index']}") in ids:
            raise WhetError(f'Two rows of the training data are "{name}" by data_source and extra_info.index.')
        ids[name] = None
    characters = [sum(len(str(turn["content"])) for turn in turns) for turns in prompts]
    levels = [level if isinstance(level := about.get("level"), int | float) else None for about in table]
    return Facts(ids=list(ids), tasks=list(sources), characters=characters, levels=levels)


class VerlDesk:
    """The actor: a desk whose groups are named by tickets, and verl's uid of each."""

    def __init__(self, facts: Facts):
        self.facts, self.opened, self.failure, self.count = facts, False, "", 0
        self.digest = hashlib.sha256("\n".join(facts.ids).encode()).hexdigest()
        self.uids: dict[str, str] = {}  # by ticket

    def open(self, config: Mapping[str, Any], state: Mapping[str, Any] | None) -> None:
        """Build the curriculum by verl's whole configuration, and load the state of a checkpoint."""
        rollout, data, trainer = config["actor_rollout_ref"]["rollout"], config["data"], config["trainer"]
        sampler, groups = trainer["v1"]["sampler"], data["train_batch_size"]
        own = dict(sampler["sampler_kwargs"])
        given, slots = own.pop("curriculum", {}), own.pop("slots", 2 * groups * rollout["n"])  # as verl's warm-up does
        if own:
            raise WhetError(f"sampler_kwargs has curriculum and slots, but {', '.join(own)} was given.")
        age = (sampler["max_off_policy_threshold"] or 10**6) - 1  # verl counts from 1
        table = {"groups": groups, "rollouts": rollout["n"], "max_age": age, **given}
        sampling = Sampling(max_tokens=rollout["response_length"], temperature=rollout["temperature"])
        settings, seed = parse_config({"curriculum": table}).curriculum, data.get("seed") or 0
        curriculum = build_curriculum(settings, facts=self.facts, sampling=sampling, seed=seed)
        # Without a KL term no one reads the reference policy, and its reset is nothing.
        self.reference = config["actor_rollout_ref"]["actor"]["use_kl_loss"] or config["algorithm"]["use_kl_in_reward"]
        for stage in settings.stages:  # now, and not when the stage begins
            refuse(stage.kl_coef, stage.entropy_coef, stage.minibatches or None, stage.temperature or None)
            self.refuse_resets(stage.reset_reference, stage.reset_optimizer)
        if curriculum.needs:
            raise WhetError(f'verl cannot compute the signal "{min(curriculum.needs)}" that this curriculum needs.')
        steps = trainer["total_training_steps"] or len(self.facts.ids) // groups * trainer["total_epochs"]
        self.desk = Desk(curriculum, groups=settings.groups, slots=slots, steps=steps)
        self.opened = True
        if state is not None:
            if state["digest"] != self.digest:
                raise WhetError("The checkpoint was written with other prompts; resume with the same data.")
            self.desk.load_state_dict(state["desk"])
            self.count, self.uids = state["count"], dict(state["uids"])
            self.wanted()  # the update is done
            for ticket in list(self.desk.errands):  # no one will ask for a group that was complete
                self.desk.resume(ticket)

    def state(self) -> dict[str, Any]:
        return {"desk": self.desk.state_dict(), "digest": self.digest, "count": self.count, "uids": self.uids}

    def wanted(self) -> int:
        """Prompts that may be begun. The trainer has one thread: it asks after it has trained on what it took."""
        if not self.opened:
            raise WhetError(f"verl's own workers were about to generate; add +{MANAGER}.")
        if self.desk.taken:
            self.desk.updated()
        return self.desk.wanted()

    def hand_out(self) -> tuple[str, str]:
        """A ticket and the id of its prompt; empty if verl asks for more than is wanted."""
        if not self.wanted():
            return "", ""
        self.count += 1
        order = self.desk.begin(str(self.count))
        return order.uid, order.prompt_id

    def start(self, ticket: str, uid: str) -> Answer:
        self.uids[ticket] = uid
        return self.desk.resume(ticket)

    def report(self, outcomes: list[Finished]) -> Answer:
        return self.desk.report(outcomes)[outcomes[0].uid]

    def ask(self, ticket: str) -> Answer:
        return self.desk.ask(ticket)

    def fail(self, sentence: str) -> None:
        self.failure = self.failure or sentence

    def unfinished(self) -> tuple[dict[str, set[int]], set[str]]:
        """The sessions that a worker must go on with, by ticket, and all uids that are known."""
        return {ticket: e.left for ticket, e in self.desk.errands.items() if not e.told}, self.known()

    def take(self, global_steps: int) -> tuple[dict[str, list[int]], dict[str, float]] | None:
        """The sessions that train, by uid, and metrics; None while the batch is not full."""
        if self.failure:
            raise WhetError(self.failure)
        self.wanted()
        if self.desk.step != global_steps - 1:
            raise WhetError(f"verl is at step {global_steps}, but the curriculum has seen {self.desk.step} updates.")
        if (groups := self.desk.take()) is None:
            return None
        batch = self.desk.batch
        assert batch is not None
        refuse(batch.kl_coef, batch.entropy_coef, batch.minibatches, *(group.weight for group in batch.groups))
        self.refuse_resets(batch.reset_reference, batch.reset_optimizer)
        trained = {self.uids[ticket]: [r.index for r in group.judged] for ticket, group in groups.items()}
        return trained, self.desk.metrics()

    def refuse_resets(self, reference: bool, optimizer: bool) -> None:
        if optimizer or (reference and self.reference):
            raise WhetError("verl cannot reset the reference or the optimiser during a run; set the resets to false.")

    def known(self) -> set[str]:
        """The uids of groups in work and of groups that may still train; what others have can be freed."""
        self.uids = {ticket: uid for ticket, uid in self.uids.items() if ticket in self.desk.errands}
        return set(self.uids.values())


def refuse(*settings: float | None) -> None:
    """Refuse what a curriculum may set for whet's own learner."""
    if any(value is not None for value in settings):
        raise WhetError("verl cannot change coefficients, minibatches, temperature or weights in a run; unset them.")
