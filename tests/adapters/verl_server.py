"""In place of verl's rollout servers, which need a GPU: one that answers by rule. It imports neither torch nor verl."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import ray

ALPHABET = "p0123456789 "  # its tokens have the numbers from 2 on


def right(number: int, session: int) -> bool:
    """The rule of the answers: it knows neither time nor order, so two runs can be compared.

    Of ten prompts, one is solved by half of its rollouts, one by a quarter, one always and the others never.
    """
    return {4: session % 2 == 0, 9: session % 4 == 1, 3: True}.get(number % 10, False)


@ray.remote(num_cpus=0)
class Server:
    """Balancer and server at once: it ends what runs when it is told to, and knows the version of its weights."""

    def __init__(self, fails: int = -1) -> None:
        self.version, self.running, self.fails = 0, asyncio.Event(), fails

    async def require_acquire_fields(self) -> list[str]:
        return []

    async def require_release_fields(self) -> list[str]:
        return []

    async def acquire_server(self, request_id: str) -> tuple[str, Any]:
        return "one", ray.get_runtime_context().current_actor

    async def release_server(self, server_id: str) -> None: ...

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> SimpleNamespace:
        await self.running.wait()
        number, session = (
            int("".join(ALPHABET[i - 2] for i in prompt_ids if i >= 2).strip("p ")),
            sampling_params["seed"],
        )
        output = SimpleNamespace(
            token_ids=[],
            log_probs=[],
            routed_experts=None,
            num_preempted=None,
            stop_reason="aborted",
            extra_fields={"global_steps": self.version},
        )
        await asyncio.sleep(0.01 * ((7 * number + 3 * session) % 5))
        if number == self.fails:
            raise RuntimeError("the server fails on this prompt")
        if self.running.is_set():
            length = min(2 + (number + session) % 6, sampling_params["max_tokens"])
            output.token_ids = [ALPHABET.index(str(int(right(number, session)))) + 2] * length
            output.log_probs, output.stop_reason = [-0.5] * length, "completed"
        return output

    async def set(self, running: bool, version: int | None) -> None:
        self.version = self.version if version is None else version
        self.running.set() if running else self.running.clear()
