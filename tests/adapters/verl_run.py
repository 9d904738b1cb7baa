"""Runs of verl on a CPU, as a program of its own: `python verl_run.py FOLDER '{"speed": {"steps": 10}, ...}'`.

Everything is verl's own (configuration, trainer loop, dataset, agent loops, reward loop, TransferQueue, checkpoints)
except what needs a GPU: the server of the language model answers by rule, and the weights are a number. The runs share
one Ray. FOLDER/NAME/log.jsonl has what was handed out and what was trained, in order, and the WhetError that ended it.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray then listens on loopback alone
import datasets
import ray
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf, open_dict
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.reward_loop import RewardLoopManager
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl_server import ALPHABET, Server

from whet.errors import WhetError

NAN = 777  # the number of a prompt whose reward is not a number
DOCS = Path(__file__).parents[2] / "docs" / "verl.md"


class SessionLoop(SingleTurnAgentLoop):
    """Tells the server which session asks."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        return await super().run({**sampling_params, "seed": kwargs["session_id"]}, **kwargs)


class Weights:
    """In place of the training workers and of the transfer of weights to the servers."""

    def __init__(self, server: Any) -> None:
        self.server, self._dispatch_info = server, {"actor": [0]}

    def _set(self, running: bool, version: int | None = None) -> None:
        ray.get(self.server.set.remote(running, version))

    def update_weights(self, global_steps: int) -> None:
        self._set(True, global_steps)

    def resume_generation_replicas(self) -> None:
        self._set(True)

    def abort_replicas(self) -> None:
        self._set(False)

    def sleep_replicas(self) -> None:
        self._set(False)

    def save_checkpoint(self, path: str, *_: Any, **__: Any) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)

    def load_checkpoint(self, **_: Any) -> None: ...


class CpuTrainer(PPOTrainerColocateAsync):
    """verl's trainer without a model; it writes a log, and kills itself in mid-step if told to."""

    def __init__(self, config: DictConfig, log: Path, given: dict[str, Any]):
        super().__init__(config)
        self.log, self.given = log.open("a"), given

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.server = Server.remote(self.given.get("fails", -1))
        self.actor_rollout_wg = self.checkpoint_manager = Weights(self.server)
        self._load_checkpoint()

    def get_llm_client(self) -> FullyAsyncLLMServerClient:
        return FullyAsyncLLMServerClient(config=self.config, load_balancer_handle=self.server)

    def get_teacher_client(self) -> None:
        return None

    def write(self, **line: Any) -> None:
        self.log.write(json.dumps(line) + "\n")
        self.log.flush()

    def _submit_batch_to_rollout(self, batch: Any) -> int:
        for ticket, index in zip(batch["ticket"], batch["index"], strict=True):
            self.write(handed=ticket, index=int(index))
        return super()._submit_batch_to_rollout(batch)

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        """Log every row that would train, with its advantage."""
        if self.global_steps == self.given.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding")]
        keys = [batch.keys[i] for i in real]
        fields = ["rm_scores", "advantages", "index", "response_mask"]
        data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=fields)
        rows = [
            [key, int(index), float(scores.sum()), float(advantages[0]), int(mask.sum())]
            for key, index, scores, advantages, mask in zip(
                keys, *(data_list(data, f) for f in ORDER), strict=True
            )
        ]
        self.write(
            step=self.global_steps, rows=rows, padding=len(batch.keys) - len(real), metrics=metrics
        )
        return batch

    def _compute_metrics(self, batch: Any, metrics: dict, timing: dict, **_: Any) -> None:
        """Log what TransferQueue keeps though neither this batch nor the desk knows it."""
        known = set(ray.get(self.train_dataset.desk.state.remote())["uids"].values())
        keys = [
            key for key, tag in tq.kv_list("train")["train"].items() if not tag.get("is_prompt")
        ]
        self.write(
            orphans=[
                key for key in keys if key.split("_")[0] not in known and key not in batch.keys
            ]
        )


ORDER = ("index", "rm_scores", "advantages", "response_mask")


def data_list(data: Any, name: str) -> list[Any]:
    return list(data[name])


def write_model(folder: Path) -> None:
    """A tokenizer and a configuration, a reward function and the agent loop; no weights."""
    vocab = {"<pad>": 0, "<eos>": 1, **{letter: i + 2 for i, letter in enumerate(ALPHABET)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder / "model")
    shape = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": len(vocab),
    }
    LlamaConfig(**shape, architectures=["LlamaForCausalLM"]).save_pretrained(folder / "model")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        f"    return float('nan') if extra_info['index'] == {NAN} else float(solution_str.startswith(ground_truth))\n"
    )
    (folder / "loops.yaml").write_text("- name: session\n  _target_: verl_run.SessionLoop\n")


def write_data(folder: Path, given: dict[str, Any]) -> None:
    rows = [
        {
            "data_source": "rule",
            "prompt": [{"role": "user", "content": f"p{number}"}],
            "reward_model": {"ground_truth": "1"},
            "extra_info": {"index": number, "level": float(number % 3)},
        }
        for number in given.get("numbers") or range(200)
    ]
    if given.get("nameless"):
        del rows[1]["extra_info"]["index"]
    folder.mkdir(exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    datasets.Dataset.from_list(rows[:4]).to_parquet(folder / "val.parquet")


def documented() -> list[str]:
    """The command-line settings of docs/verl.md, which a user copies."""
    block = re.search(r"```text\n(data\.custom_cls.*?)```", DOCS.read_text(), re.S)
    assert block is not None
    return [
        line.split("  #")[0].strip().strip("'") for line in block[1].splitlines() if line.strip()
    ]


def configure(folder: Path, name: str, given: dict[str, Any]) -> DictConfig:
    left_out = ["sampler_kwargs", *given.get("without", [])]
    chosen = [line for line in documented() if not any(part in line for part in left_out)]
    settings = {
        "data.train_files": folder / name / "train.parquet",
        "data.val_files": folder / name / "val.parquet",
        "data.train_batch_size": given.get("groups", 8),
        "data.max_prompt_length": 16,
        "data.max_response_length": 8,
        "data.filter_overlong_prompts_workers": 1,
        "data.seed": 1,
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": given.get("n", 6),
        "actor_rollout_ref.rollout.agent.num_workers": given.get("workers", 1),
        "actor_rollout_ref.rollout.agent.default_agent_loop": "session",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": folder / "loops.yaml",
        "actor_rollout_ref.actor.ppo_mini_batch_size": given.get("groups", 8),
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": True,  # the server's log-probs are those of the policy
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": folder / "reward.py",
        "trainer.total_training_steps": given.get("steps", 3),
        "trainer.save_freq": given.get("save", -1),
        "trainer.logger": "[console]",
        "trainer.val_before_train": given.get("validate", False),
        "trainer.default_local_dir": folder / given.get("checkpoints", name) / "checkpoints",
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            [*chosen, *(f"{k}={v}" for k, v in settings.items()), *given.get("more", [])],
        )
    with open_dict(config):
        config.trainer.v1.sampler.sampler_kwargs = given.get("sampler", {})
        config.transfer_queue.enable = True
    return config


def plant(checkpoints: Path) -> None:
    """A checkpoint of a run without whet."""
    (checkpoints / "global_step_1").mkdir(parents=True)
    torch.save({"dataset_state": None}, checkpoints / "global_step_1" / "data.pt")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("1")


def run(
    folder: Path, name: str, given: dict[str, Any], reward: RewardLoopManager | None
) -> RewardLoopManager:
    """One run to its end, or to the WhetError that it meets."""
    write_data(folder / name, given)
    if given.get("foreign"):
        plant(folder / name / "checkpoints")
    config = configure(folder, name, given)
    trainer = CpuTrainer(config, folder / name / "log.jsonl", given)
    trainer.reward_loop_manager = reward or RewardLoopManager(config)
    own = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
    try:
        trainer.init()
        clients = {"llm_client": trainer.get_llm_client(), "teacher_client": None}
        manager = load_class_from_fqn(own or "verl.trainer.ppo.v1.AgentLoopManagerTQ")
        handles = trainer.get_reward_handles()
        trainer.fit(manager.create(config=config, reward_loop_worker_handles=handles, **clients))
    except WhetError as error:
        trainer.write(error=f"{type(error).__name__}: {error}")
    for actor in ray.util.list_named_actors():
        if actor == "whet_desk" or actor.startswith("agent_loop_worker"):
            ray.kill(ray.get_actor(actor))
    for partition, listed in tq.kv_list().items():
        if listed:
            tq.kv_clear(list(listed), partition)
    return trainer.reward_loop_manager


def main(folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    write_model(folder)
    short = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # Ray's socket names have a limit
    # TransferQueue's actors wait for CPUs, of which a small machine has too few; workers have a low priority, else.
    options = {
        "include_dashboard": False,
        "logging_level": "ERROR",
        "_system_config": {"worker_niceness": 0},
    }
    ray.init(num_cpus=32, _temp_dir=short, **options)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    reward = None
    for name, given in runs.items():
        reward = run(folder, name, given, reward)

    def _clear_groups(self: Any, uids: set[str]) -> None: ...

    ReplayBufferAsync._clear_groups = _clear_groups  # as if verl had changed it
    try:
        importlib.reload(importlib.import_module("whet.adapters.verl"))
    except WhetError as error:
        (folder / "changed.txt").write_text(str(error))
    tq.close()
    ray.shutdown()
    shutil.rmtree(short, ignore_errors=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
