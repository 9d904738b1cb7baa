"""What `whet doctor` says of models that fit, that do not, and that are refused; no weight is ever read."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from whet import __version__, cli, config
from whet.errors import WhetError
from whet.estimate import Machine
from whet.fast.fused import graphs_lack
from whet.fast.kernels import attention
from whet.fast.kernels.attention import kernel_lacks
from whet.findings import FAMILIES, decoding_of, machine_of, size_up_here
from whet.model import memory
from whet.model.load import check_model
from whet.model.memory import SPARE, Footprint, MemoryPlan, ModelShape, Room, free_memory
from whet.model.twin import PAGE, kv_shapes
from whet.recipe import load_config
from whet.tools.doctor import examine, skeleton_of

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def folder_of(settings: PreTrainedConfig, path: Path) -> str:
    """A model folder whose weights are no weights: reading them fails."""
    path.mkdir(parents=True)
    settings.architectures = [f"{type(settings).__name__.removesuffix('Config')}ForCausalLM"]
    settings.save_pretrained(path)
    (path / "model.safetensors").write_bytes(b"not weights")
    return str(path)


def findings_of(model: str, *sets: str) -> dict[str, tuple[str, bool]]:
    settings = load_config(sets=sets)
    return {what: (found, fine) for what, found, fine in examine(model, settings)}


def inner_of(model: str) -> int:
    settings = load_config(sets=[f"model.name='{model}'"])
    return size_up_here(skeleton_of(settings), settings).shape.inner


def test_machine_alone() -> None:
    found = {what: fine for what, _, fine in examine()}
    assert {"python", "torch", "device", "free disk here"} <= found.keys()
    assert "model" not in found and all(found.values())


def test_a_bug_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Versions, hardware and extras, of which one lacks a package; a token in the environment is never shown."""
    needs = [
        "numpy>=1.26",
        "torch>=2; extra == 'lora'",
        'nowhere==1.*; extra == "ray"',
        "torch; extra == 'ray'",
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needs)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("sys.argv", ["whet", "doctor", "--json"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    printed = capsys.readouterr().out
    found = {row["what"]: row["found"] for row in json.loads(printed)}
    assert left.value.code == 0 and "hf_secret" not in printed
    assert found["whet"].startswith(__version__) and found["environment"].startswith(
        "OMP_NUM_THREADS=1"
    )
    assert found["whet[lora]"] == f"torch {torch.__version__}: adapters (model.lora)"
    assert found["whet[ray]"] == "lacks nowhere: several machines ([cluster])"
    assert {"python", "system", "cores", "device", "transformers"} <= found.keys()


def test_model_is_examined_without_its_weights(tmp_path: Path) -> None:
    name = folder_of(LlamaConfig(**SMALL, tie_word_embeddings=True), tmp_path / "m")
    found = findings_of(name, 'model.device="cpu"')
    parameters = 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 64) + 32
    assert found["model"] == (
        f"LlamaForCausalLM, {parameters / 1e6:.2f}M parameters, in float32",
        True,
    )
    assert found["path"][0].startswith("slow path: on a CPU")
    assert "64 rollouts of 256 tokens" in found["memory"][0], (
        "no more context than the model has positions"
    )
    assert found["fits"][1] and found["fits"][0].startswith("yes")


def test_doctor_says_on_what_the_family_was_tried(tmp_path: Path) -> None:
    for kind, sentence in (
        (LlamaConfig, "Llama, tried on real weights (SmolLM2-135M)"),
        (Gemma2Config, "Gemma 2, tested with a tiny configuration only"),
        (Qwen3MoeConfig, "qwen3_moe, never tried with whet"),
    ):
        name = folder_of(kind(**SMALL), tmp_path / kind.model_type)
        assert findings_of(name, 'model.device="cpu"')["family"] == (sentence, True)


def test_the_docs_and_the_tests_have_the_same_families() -> None:
    """docs/models.md shows the table, and every family that is tested stands in it."""
    page = Path(__file__).parents[1].joinpath("docs/models.md").read_text()
    table = page.partition("| family | tried on |\n|---|---|\n")[2].partition("\n\n")[0]
    shown = [
        tuple(cell.strip() for cell in row.strip("|").split("|")) for row in table.splitlines()
    ]
    weights = {
        name: f"real weights ({tried})" if tried else "tiny configuration only"
        for name, tried in FAMILIES.values()
    }
    assert dict(shown) == weights and len(shown) == len(weights)
    assert {kind.model_type for kind, _ in families.FAMILIES.values()} == set(FAMILIES)


def test_how_rollouts_are_decoded(tmp_path: Path) -> None:
    """Asked for a GPU that need not be here: nothing is loaded onto it."""
    network = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    capped = AutoModelForCausalLM.from_config(Gemma2Config(**SMALL))
    wide = AutoModelForCausalLM.from_config(LlamaConfig(**{**SMALL, "head_dim": 512}))
    plain, graphs = load_config(sets=["rollout.graphs=false"]), load_config(sets=[])
    cuda = torch.device("cuda")
    assert (
        decoding_of(network, graphs, torch.device("cpu")) == "plain calls of the model's own layers"
    )
    assert decoding_of(wide, graphs, cuda) == (
        "plain calls of the model's own layers, since the attention kernel takes heads of at most 256 numbers, not 512"
    )
    pytest.importorskip("triton")
    assert "rollout.graphs = true" in decoding_of(network, plain, cuda)
    assert decoding_of(network, graphs, cuda) == "graphs over kernels, fused layers"
    assert "its own layers: Gemma2ForCausalLM is not one of" in decoding_of(capped, graphs, cuda)
    adapted = load_config(sets=["model.lora.rank=4"])
    assert decoding_of(network, adapted, cuda).endswith("its own layers: adapters are not merged")


def test_a_run_says_how_the_gpu_is_divided() -> None:
    gib = 2**30
    plan = MemoryPlan(
        weights=3 * gib,
        masters=6 * gib,
        moments=12 * gib,
        reference=0,
        cache=40 * gib,
        graphs=gib,
        gradients=6 * gib,
        activations=50 * gib,
        logits=gib,
        decoding=gib,
    )
    footprint = billion()
    (line,) = footprint.memory_lines(Room(plan=plan, pages=0, release=False))
    assert line.startswith("119.0 GiB at the peak for 64 rollouts of 4,096 tokens and packs of ")
    assert ": activations (estimate) 50.0 GiB + KV cache 40.0 GiB + " in line
    assert "Adam moments 12.0 GiB" in line and "graphs (estimate) 1.0 GiB" in line
    first, second, third = footprint.memory_lines(Room(plan=plan, pages=99, release=True))
    assert first.startswith("79.0 GiB at the peak")
    assert second.startswith(
        "the KV cache (40.0 GiB) is released for each update and taken back after it"
    )
    assert third.startswith("the KV pool is 99 pages")


def billion(*sets: str) -> Footprint:
    """1.5 billion parameters in 28 layers, by graphs on a GPU."""
    shape = ModelShape(
        parameters=1_540_000_000,
        adapted=1_000_000,
        layers=28,
        hidden=1536,
        inner=8960,
        heads=12,
        query=1536,
        cached=28 * 512,
        vocab=151_936,
        softcap=False,
        flash=True,
    )
    settings = load_config(sets=["rollout.context=4096", 'model.dtype="bfloat16"', *sets])
    return Footprint(shape=shape, settings=settings, device=torch.device("cuda"), flash=True)


def test_several_gpus_divide_masters_and_moments() -> None:
    """12 of the 20 bytes of a parameter; the sentence of a refusal names the setting where it is enough."""
    alone, eight = billion(), replace(billion(), processes=8)
    divided = replace(billion("learn.shard=optimizer"), processes=8)
    assert eight.plan() == alone.plan()
    assert eight.plan().total - divided.plan().total == 12 * alone.shape.parameters * 7 // 8
    with pytest.raises(WhetError, match=r'enough would be learn\.shard = "optimizer"'):
        eight.room(eight.least() - 1)
    with pytest.raises(WhetError) as refused:
        alone.room(alone.least() - 1)
    assert "learn.shard" not in str(refused.value)


def test_several_gpus_divide_gradients_and_the_learners_weights() -> None:
    """The engine's weights stay whole; where only that division is enough, the sentence names it."""
    eight, full = (replace(billion(*sets), processes=8) for sets in ((), ("learn.shard=full",)))
    count, plan = full.shape.parameters, full.plan()
    assert (plan.weights, plan.masters, plan.moments) == (2 * count, 4 * count // 8, 8 * count // 8)
    assert plan.gradients == 4 * count // 8 + full.gathered() and full.gathered() < count
    kl = replace(billion("learn.shard=full", "learn.kl_coef=0.1"), processes=8).plan()
    assert kl.reference == 2 * count // 8
    adapters = replace(billion("learn.shard=full", "model.lora.rank=16"), processes=8).plan()
    assert adapters.weights == 2 * (count + 16 * 1_000_000) + 2 * count // 8, (
        "frozen weights are divided, too"
    )
    within = full.lay_out(0).total
    assert eight.ways_to_fit(within)[0] == ('learn.shard = "full"', full.lay_out(within).total)


def test_a_training_that_cannot_fit_is_refused_before_it_begins() -> None:
    """20 bytes for each of 1.54 billion parameters are 28.7 GiB, and not all that it takes."""
    footprint = billion("learn.pack_tokens=16384")
    fewest = footprint.least()
    assert 20 * footprint.shape.parameters < fewest < footprint.lay_out(0).total
    with pytest.raises(WhetError) as refused:
        footprint.room(fewest - 1)
    sentence = str(refused.value)
    assert (
        sentence.startswith("This training does not fit on the GPU: it takes ")
        and "\n" not in sentence
    )
    assert (
        "to be had (a tenth is left free); enough would be learn.checkpoint_activations = true."
        in sentence
    )
    tight = footprint.room(fewest)
    assert tight.total > fewest * (1 - SPARE)
    assert footprint.memory_lines(tight)[-1].startswith("memory is tight: that is ")
    roomy = footprint.room(10 * fewest)
    assert len(footprint.memory_lines(roomy)) == 1 and roomy.total <= 9 * fewest


def test_the_least_is_one_sequence_at_a_time() -> None:
    """What packs, pool and waves of prompts shrink to; whole slots and a pool that may not be lent stay."""
    fewest = billion("rollout.slots=64").least()
    assert (
        billion("rollout.slots=64", "learn.pack_tokens=65536", "rollout.pages=4000").least()
        == fewest
    )
    keep = ("rollout.mode=stream", "rollout.on_update=keep", "curriculum.max_age=1")
    assert billion("rollout.slots=64", *keep).least() - fewest == (4096 + PAGE) * 28 * 512 * 2, (
        "one context stays"
    )
    whole = [
        billion(f"rollout.slots={n}", "rollout.graphs=false", *keep).least() for n in (64, 128)
    ]
    assert whole[1] - whole[0] == 64 * 4096 * 28 * 512 * 2, (
        "slots of their own are as many as they are"
    )


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """What the kernels lack is remembered, but not what a test makes up."""
    kernel_lacks.cache_clear()
    yield
    kernel_lacks.cache_clear()


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize("lacks", ["triton", "heads", "dtype"])
def test_doctor_and_engine_ask_the_same_of_the_kernels(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "has_triton", lambda: lacks != "triton")
    network = AutoModelForCausalLM.from_config(
        LlamaConfig(**{**SMALL, "head_dim": 512 if lacks == "heads" else 8})
    )
    settings = load_config(
        sets=['model.dtype="float64"' if lacks == "dtype" else 'model.dtype="bfloat16"']
    )
    why = {
        "triton": "Triton is not installed",
        "heads": "the attention kernel takes heads of at most 256 numbers, not 512",
        "dtype": "the attention kernel has no float64",
    }[lacks]
    cuda = torch.device("cuda")
    assert (
        decoding_of(network, settings, cuda)
        == f"plain calls of the model's own layers, since {why}"
    )
    shapes = kv_shapes(network.to(getattr(torch, settings.model.dtype)))
    assert graphs_lack(shapes, cuda) == why and graphs_lack(shapes, torch.device("cpu")) is None
    assert network.config._attn_implementation == "sdpa", "asking leaves the model as it was"


def test_machine_of_a_recipe() -> None:
    machine = machine_of(torch.device("cpu"))
    assert (
        isinstance(machine, Machine)
        and machine.gpu is None
        and machine.threads >= 1
        and "CPU" in machine.name
    )


def test_default_settings_are_planned_for(tmp_path: Path) -> None:
    name = folder_of(LlamaConfig(**{**SMALL, "max_position_embeddings": 9000}), tmp_path / "m")
    assert any(
        "64 rollouts of 4,096 tokens" in found
        for what, found, _ in examine(name)
        if what == "memory"
    )


def test_too_large_a_model_says_what_helps(tmp_path: Path) -> None:
    """A hundred billion parameters, of which only the config exists."""
    giant = {
        **SMALL,
        "hidden_size": 131_072,
        "intermediate_size": 131_072,
        "num_hidden_layers": 2,
        "head_dim": 128,
    }
    found = findings_of(folder_of(LlamaConfig(**giant), tmp_path / "m"), 'model.device="cpu"')
    sentence, fine = found["fits"]
    assert not fine and sentence.startswith("no: ") and "model.lora.rank = 16" in sentence


def test_too_many_slots_say_how_many_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = folder_of(LlamaConfig(**SMALL), tmp_path / "m")
    monkeypatch.setattr(memory, "free_memory", lambda device: 200 * 2**20)
    sentence, fine = findings_of(
        name,
        'model.device="cpu"',
        "rollout.slots=4096",
        "rollout.context=250",
        "rollout.max_tokens=99",
    )["fits"]
    assert not fine and "rollout.slots = 1024" in sentence
    assert "200.0 MiB" not in sentence and "180.0 MiB" in sentence, "a tenth is left free"


def test_refused_models_are_one_sentence(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    cases = {
        str(tmp_path / "nowhere"): "no model folder",
        folder_of(
            MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64), tmp_path / "mamba"
        ): "attention",
        folder_of(LlamaConfig(**SMALL, rope_parameters=rope), tmp_path / "rope"): "dynamic",
    }
    for name, words in cases.items():
        found = findings_of(name)
        sentence, fine = found["model"]
        assert (
            not fine
            and sentence.startswith("refused: ")
            and words in sentence
            and "\n" not in sentence
        )
        assert "fits" not in found


def test_context_beyond_the_model_is_refused(tmp_path: Path) -> None:
    name = folder_of(LlamaConfig(**SMALL), tmp_path / "m")
    sentence, fine = findings_of(name, "rollout.context=300", "rollout.max_tokens=99")["model"]
    assert not fine and "256 positions" in sentence


def test_adapters_are_counted_and_checked(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    name = folder_of(LlamaConfig(**SMALL), tmp_path / "m")
    assert "adapters of rank 4" in findings_of(name, "model.lora.rank=4")["model"][0]
    sentence, fine = findings_of(name, "model.lora.rank=4", 'model.lora.targets=["nope"]')["model"]
    assert not fine and "nope" in sentence


def test_peft_folder_is_planned_with_its_own_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base = folder_of(LlamaConfig(**SMALL), tmp_path / "base")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    said = {
        "peft_type": "LORA",
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": base,
    }
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    (adapter / "adapter_model.safetensors").write_bytes(b"not weights")
    assert "0.00M more in adapters of rank 3" in findings_of(str(adapter))["model"][0]


def test_experts_and_gpt2_are_examined(tmp_path: Path) -> None:
    """All weights of experts are counted, but a token passes through two of the four."""
    experts = {"num_experts_per_tok": 2, "pad_token_id": 0}
    mixtral = folder_of(
        MixtralConfig(**SMALL, num_local_experts=4, **experts), tmp_path / "mixtral"
    )
    attention = 2 * 32 * 32 + 2 * 32 * 16
    parameters = 2 * 64 * 32 + 2 * (attention + 4 * 32 + 4 * 3 * 32 * 64 + 2 * 32) + 32
    assert findings_of(mixtral)["model"] == (
        f"MixtralForCausalLM, {parameters / 1e6:.2f}M parameters, in float32",
        True,
    )
    assert inner_of(mixtral) == 2 * 64
    qwen = folder_of(
        Qwen3MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=16, **experts),
        tmp_path / "qwen",
    )
    assert inner_of(qwen) == 2 * 16
    gpt2 = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, pad_token_id=0
    )
    found = findings_of(folder_of(gpt2, tmp_path / "gpt2"))
    assert found["model"][0].startswith("GPT2ForCausalLM, 0.03M") or found["model"][0].startswith(
        "GPT2LMHeadModel"
    )
    assert "64 rollouts of 128 tokens" in found["memory"][0] and found["fits"][1]


def test_what_the_engine_would_refuse_is_refused_without_weights(tmp_path: Path) -> None:
    sinks = folder_of(GptOssConfig(**SMALL, num_local_experts=4), tmp_path / "sinks")
    wanted = "refused: GptOssForCausalLM needs s_aux in its attention, which whet's engine does not know."
    assert findings_of(sinks)["model"] == (wanted, False)
    with pytest.raises(WhetError, match="needs s_aux"):
        check_model(config.Model(name=sinks))


def test_hub_name_reads_the_config_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub cache that holds nothing but config.json, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--org--small" / "snapshots" / ("a" * 40)
    folder_of(LlamaConfig(**SMALL), snapshot)
    (snapshot / "model.safetensors").unlink()
    (tmp_path / "models--org--small" / "refs").mkdir()
    (tmp_path / "models--org--small" / "refs" / "main").write_text("a" * 40)
    assert AutoConfig.from_pretrained(snapshot).model_type == "llama"
    assert findings_of("org/small")["model"][1]
    sentence, fine = findings_of("org/other")["model"]
    assert not fine and "org/other" in sentence


def test_tiny_and_its_wrong_shape() -> None:
    assert findings_of("tiny")["fits"][1]
    sentence, fine = findings_of("tiny", "model.hidden=10")["model"]
    assert not fine and "model.hidden" in sentence


def test_paths() -> None:
    shape = {
        "parameters": 1,
        "adapted": 1,
        "layers": 1,
        "hidden": 8,
        "inner": 8,
        "heads": 1,
        "query": 8,
        "cached": 16,
    }
    plain, capped = (
        ModelShape(**shape, vocab=8, softcap=cap, flash=not cap) for cap in (False, True)
    )
    odd = ModelShape(**shape, vocab=8, softcap=False, flash=False)

    def path(shape: ModelShape, device: str, *sets: str) -> str:
        return Footprint(
            shape=shape, settings=load_config(sets=sets), device=torch.device(device), flash=False
        ).path()

    assert "on a CPU" in path(plain, "cpu")
    assert "soft-capped" in path(capped, "cuda")
    assert "heads" in path(odd, "cuda")
    assert 'model.dtype = "bfloat16"' in path(plain, "cuda")
    assert "older" in path(plain, "cuda", 'model.dtype="bfloat16"')


@pytest.mark.gpu
def test_fast_path_is_what_packing_does() -> None:
    from whet.model.packing import can_varlen

    half = load_config(sets=['model.dtype="bfloat16"', 'model.device="cuda"'])
    said = size_up_here(skeleton_of(half), half).path()
    x = torch.zeros(4, 1, 8, dtype=torch.bfloat16, device="cuda")
    assert said.startswith("fast") == can_varlen(x, x, None)


def test_soft_caps_of_a_real_family(tmp_path: Path) -> None:
    name = folder_of(Gemma2Config(**SMALL, sliding_window=16), tmp_path / "m")
    assert findings_of(name)["fits"][1]


def test_free_memory_is_plausible() -> None:
    free = free_memory(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50
