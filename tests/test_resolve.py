"""A run is checked before any weight is loaded, built from what was checked, and carried over by checkpoints."""

import json
from collections import Counter
from pathlib import Path
from string import printable

import numpy as np
import pytest
import torch
from small_run import Silent, even_digits, model_folder, problem_file, small_config
from transformers import GPT2Config, LlamaConfig

from whet import loop, resolve
from whet.build import Tally, build_parts, refuse_unmet
from whet.errors import WhetError
from whet.learn.optimizer import default_lr
from whet.loop import Log, solution_batches
from whet.model import load, memory
from whet.model.load import tiny_tokenizer
from whet.problems import load_problems
from whet.recipe import dump_config, load_config
from whet.resolve import RunPlan, check_run
from whet.rollout.engine import LocalEngine
from whet.run import Run
from whet.text import Codec
from whet.tools.doctor import examine
from whet.types import Prompt, Request, Rollout, Sampling


def checked(tmp_path: Path, *sets: str, chat: bool = False) -> RunPlan:
    model = model_folder(tmp_path / "model", chat=chat)
    data = problem_file(tmp_path / "data.jsonl", 150)
    return check_run(
        load_config(
            sets=[f"model.name='{model}'", f"data.0.path='{data}'", "rollout.max_tokens=20", *sets]
        )
    )


def test_context_is_just_enough_for_the_longest_prompt_and_response(tmp_path: Path) -> None:
    longest = len("What is 149+2?")
    assert checked(tmp_path).settings.rollout.context == longest + 20
    test = problem_file(tmp_path / "test.jsonl", 20)  # "What is 19+5?"
    found = checked(tmp_path, f"eval.0.path='{test}'", "eval.0.max_tokens=100", "held_out.size=0")
    assert found.settings.rollout.context == len("What is 19+5?") + 100


def test_a_context_of_the_recipe_stays_and_is_held_to(tmp_path: Path) -> None:
    assert checked(tmp_path, "rollout.context=64").settings.rollout.context == 64
    longest = len("What is 149+2? Tell me why.")
    suffix = ("text.prompt_suffix=' Tell me why.'", "held_out.size=0")
    assert (
        checked(tmp_path, f"rollout.context={longest + 1}", *suffix).encoded.lengths.max()
        == longest
    )
    with pytest.raises(WhetError) as error:
        checked(tmp_path, f"rollout.context={longest}", *suffix)
    assert (
        f"has {longest} tokens, which with 1 for the response is more than rollout.context = {longest}; raise"
        in (str(error.value))
    )


def test_a_dry_run_estimates_tokens_and_time(tmp_path: Path) -> None:
    """16 groups of 16 rollouts, half of 20 tokens; as long as those of another run, where one is named."""
    found = checked(tmp_path, 'model.device="cpu"')
    step, run = [line for line in found.describe() if line.startswith("time")]
    assert step.startswith(
        "time: 256 rollouts of 10 tokens (half of the limit) are 2,560 tokens per step; "
    )
    assert "per step: generate 0" in step and " s, train " in step
    assert run.startswith("time: 100 steps on a CPU, ") and run.endswith("without evaluation")
    measured = "\n".join(found.describe(response=14.0))
    assert "256 rollouts of 14 tokens (as in that run) are 3,584 tokens per step" in measured
    assert "256 rollouts of 20 tokens" in "\n".join(found.describe(response=99.0)), (
        "not beyond the limit"
    )


def test_the_automatic_context_ends_with_the_positions_of_the_model(tmp_path: Path) -> None:
    found = checked(tmp_path, "rollout.max_tokens=5000", 'model.device="cpu"')
    assert found.settings.rollout.context == 512
    assert any("has 512 positions, fewer than the 5014" in note for note in found.notes)
    assert [line for line in found.describe() if line.startswith("time")]


def test_what_training_refuses_is_refused_before_it(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=r"rollout\.context = 600 is more than the 512 positions"):
        checked(tmp_path, "rollout.context=600")
    with pytest.raises(WhetError, match=r"rollout\.context = 512"):
        checked(tmp_path, f"text.prompt_suffix='{'x' * 600}'")


def test_a_drafter_that_cannot_be_is_refused_before_training(tmp_path: Path) -> None:
    gpt2 = GPT2Config(vocab_size=102, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    gpt2.architectures = ["GPT2LMHeadModel"]
    gpt2.save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer(printable).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "gpt2" / "model.safetensors").write_bytes(b"no weights: none is read")
    data = problem_file(tmp_path / "data.jsonl", 20)
    sets = [f"model.name='{tmp_path / 'gpt2'}'", f"data.0.path='{data}'", "rollout.max_tokens=20"]
    check_run(load_config(sets=sets))
    with pytest.raises(WhetError, match="No EAGLE drafter can be made"):
        check_run(load_config(sets=[*sets, 'draft.drafters=["eagle"]']))


def test_the_learning_rate_is_chosen_by_what_is_trained(tmp_path: Path) -> None:
    found = checked(tmp_path)
    assert (
        found.settings.learn.lr == 2e-4
        and "learn.lr = 0.0002, chosen for a tiny model." in found.describe()
    )
    assert checked(tmp_path, "learn.lr=3e-5").settings.learn.lr == 3e-5
    large = LlamaConfig(
        vocab_size=100,
        hidden_size=256,
        intermediate_size=11264,
        num_hidden_layers=15,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    tiny_tokenizer(printable).save_pretrained(tmp_path / "large")
    large.save_pretrained(tmp_path / "large")
    (tmp_path / "large" / "model.safetensors").write_bytes(b"no weights: none is read")
    data = problem_file(tmp_path / "data.jsonl", 20)
    sets = [f"model.name='{tmp_path / 'large'}'", f"data.0.path='{data}'", "rollout.max_tokens=20"]
    # 15 layers of 3 x 256 x 11,264 + 4 x 256^2 + 2 x 256 weights; embedding and head of 100 x 256; the last norm
    parameters = 15 * (3 * 256 * 11264 + 4 * 256**2 + 2 * 256) + 2 * 100 * 256 + 256
    assert parameters == 133_752_576
    full = check_run(load_config(sets=sets))
    assert full.settings.learn.lr == 7.8e-6 == default_lr(parameters)
    assert "learn.lr = 7.8e-06, chosen for all 134M weights." in full.notes
    adapted = check_run(load_config(sets=[*sets, "model.lora.rank=4"]))
    assert (
        adapted.settings.learn.lr == 2e-4
        and "learn.lr = 0.0002, chosen for adapters." in adapted.notes
    )


def test_paths_hold_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "model")
    problem_file(tmp_path / "data.jsonl", 20)
    (tmp_path / "sets").mkdir()
    monkeypatch.chdir(tmp_path)
    sets = [
        "model.name=model",
        "data.0.path=data.jsonl",
        "eval.0.path=data.jsonl",
        "data_folder=sets",
    ]
    settings = check_run(load_config(sets=[*sets, "rollout.max_tokens=9"])).settings
    assert settings.model.name == str(tmp_path / "model") and settings.data_folder == str(
        tmp_path / "sets"
    )
    assert settings.data[0].path == settings.eval[0].path == str(tmp_path / "data.jsonl")
    assert settings.eval[0].name == "data"
    monkeypatch.chdir("/")
    assert check_run(settings).settings == settings
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert check_run(load_config()).settings.model.name == "tiny", "a name is no path"


def test_a_dry_run_counts_screening_and_stages(tmp_path: Path) -> None:
    screened = checked(tmp_path, "curriculum.name=speed", 'model.device="cpu"').describe()
    assert any("time: 320 rollouts" in line for line in screened), (
        "4 for twice the prompts, 12 more for half of them"
    )
    stages = "curriculum.stages=[{max_tokens=10, steps=30}, {max_tokens=20, rollouts=8}]"
    lines = [
        line
        for line in checked(tmp_path, stages, 'model.device="cpu"').describe()
        if line.startswith("time")
    ]
    assert lines[0].startswith("time: stage 1, 30 steps: 256 rollouts of 5 tokens")
    assert lines[1].startswith("time: stage 2, 70 steps: 128 rollouts of 10 tokens")


def test_training_needs_data(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match="nothing to train on"):
        checked(tmp_path, "data=[]")


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    found = checked(tmp_path, "text.max_prompt=13", "held_out.size=0")
    kept = [prompt.text for prompt in found.problems.train]
    assert len(kept) == 100 and max(map(len, kept)) == 13
    assert any(
        "50 training problems" in note and "text.max_prompt = 13" in note for note in found.notes
    )
    with pytest.raises(WhetError, match="Every training problem"):
        checked(tmp_path, "text.max_prompt=3")


def test_dry_run_shows_what_the_model_reads_and_what_ends_it(tmp_path: Path) -> None:
    lines = "\n".join(
        checked(
            tmp_path, "text.prompt_suffix=' Think.'", "rollout.stop_strings=['STOP']", chat=True
        ).describe()
    )
    assert "135 training prompts; 15 in held_out" in lines
    assert "<eos>" in lines and "<|end|>" in lines and "'STOP'" in lines
    assert r"<|turn|>user\nWhat is " in lines and r"Think.<|end|><|turn|>assistant\n" in lines


@pytest.mark.parametrize("name", ["scalingrl", "all"])
def test_a_moving_set_without_levels_says_once_what_it_leaves_out(
    tmp_path: Path, name: str
) -> None:
    plain = problem_file(tmp_path / "plain.jsonl", 150, level=None)

    def said(*sets: str, data: str = plain) -> list[str]:
        found = checked(tmp_path, f"curriculum.name={name}", f"data.0.path='{data}'", *sets)
        return [note for note in found.notes if "level" in note]

    assert said() == [
        "No training prompt has a number as its level, so ScalingRL leaves difficulty out of its score; add a level "
        "column to the data to weigh it."
    ]
    assert not said("curriculum.scalingrl.select=random")
    assert not said("curriculum.scalingrl.weights=[0.0, 0.5, 0.5]")
    assert not said("curriculum.name=uniform")
    assert not said(data=problem_file(tmp_path / "levels.jsonl", 150)), "these have levels"


def broken(tmp_path: Path, good: int, bad: int) -> str:
    rows = [
        {"prompt": f"What is {i}?", "answer": str(i) if i < good else f"{i}}}"}
        for i in range(good + bad)
    ]
    (tmp_path / "broken.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "broken.jsonl")


def test_answers_that_cannot_be_right_are_noted_and_refused(tmp_path: Path) -> None:
    path = broken(tmp_path, 60, 40)
    found = checked(tmp_path, f"data.0.path='{path}'", "held_out.size=0")
    (note,) = [note for note in found.notes if "cannot be matched" in note]
    assert note.startswith(
        f"{path}: 40 of 100 answers cannot be matched by this judge, such as '60}}'"
    )
    assert note in found.describe()
    path = broken(tmp_path, 40, 60)
    for place in ("data.0", "data.1", "eval.0"):
        with pytest.raises(
            WhetError, match=r"60 of 100 answers cannot be matched by this judge.*columns = "
        ):
            checked(tmp_path, f"{place}.path='{path}'", "held_out.size=0")


def test_a_judge_of_the_user_is_not_asked_about_the_answers(tmp_path: Path) -> None:
    path = broken(tmp_path, 0, 100)
    model = model_folder(tmp_path / "model", chat=False)
    settings = load_config(
        sets=[f"model.name='{model}'", f"data.0.path='{path}'", "rollout.max_tokens=20"]
    )
    assert not [
        note
        for note in check_run(settings, lambda prompt, response: 1.0).notes
        if "cannot be" in note
    ]
    own = checked(tmp_path, f"data.0.path='{path}'", 'data.0.reward="operator:is_not"')
    assert not [note for note in own.notes if "cannot be" in note]


def test_without_answers_there_must_be_a_judge(tmp_path: Path) -> None:
    with pytest.raises(
        WhetError, match=r"without an answer column, and no judge of yours decides; name the column"
    ):
        checked(tmp_path, 'data.0.columns={answer=""}')
    assert (
        checked(
            tmp_path, 'data.0.columns={answer=""}', 'data.0.reward="operator:is_not"'
        ).problems.matched
        == {}
    )


# ---- checked once, then used


def test_prompts_are_encoded_and_the_curriculum_is_built_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the check to the first update: each prompt is tokenised once, and nothing is built a second time."""
    encoded: Counter[str] = Counter()
    built: Counter[str] = Counter()
    encode_all = Codec.encode_all

    def encoding(self: Codec, prompts: list[Prompt]) -> list[list[int]]:
        encoded.update(prompt.id for prompt in prompts)
        return encode_all(self, prompts)

    def counted(module: object, name: str) -> None:
        function = getattr(module, name)

        def call(*args: object, **kwargs: object) -> object:
            built[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    monkeypatch.setattr(Codec, "encode_all", encoding)
    for module, name in (
        (resolve, "build_curriculum"),
        (resolve, "Codec"),
        (load, "load_tokenizer"),
        (load, "check_model"),
        (load, "build_skeleton"),
    ):
        counted(module, name)
    plan = checked(
        tmp_path,
        "steps=1",
        "curriculum.groups=2",
        "curriculum.rollouts=2",
        "curriculum.starvation=partial",
    )
    parts = build_parts(plan)
    try:
        with Run.create(tmp_path / "run", dump_config(plan.settings)) as run:
            loop.train(parts, Log(run, parts, Silent()))
        assert parts.tally.step == 1
    finally:
        parts.close()
    everything = [*plan.problems.train.ids, *plan.problems.eval_by_id]
    assert len(everything) == 150 and encoded == Counter(everything)
    names = ("build_curriculum", "Codec", "load_tokenizer", "check_model", "build_skeleton")
    assert built == Counter(dict.fromkeys(names, 1))


def test_encoded_prompts_are_what_the_codec_encodes(tmp_path: Path) -> None:
    plan = checked(tmp_path, "text.max_prompt=13", chat=False)
    for prompt in (*plan.problems.train, *plan.problems.eval_by_id.values()):
        assert plan.encoded(prompt.id) == plan.codec.encode(prompt)


def test_the_dry_run_and_doctor_show_the_same_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**33)
    plan = checked(tmp_path, 'model.device="cpu"')
    sets = [
        f"data.0.path='{tmp_path / 'data.jsonl'}'",
        "rollout.max_tokens=20",
        'model.device="cpu"',
    ]
    shown = examine(str(tmp_path / "model"), load_config(sets=sets))
    wanted = ("model", "family", "path", "rollouts", "memory", "fits", "time")
    lines = [f"{what}: {found}" for what, found, _ in shown if what in wanted]
    assert [line.partition(":")[0] for line in lines] == [
        "model",
        "family",
        "path",
        "rollouts",
        "memory",
        "fits",
        "time",
        "time",
    ]
    described = plan.describe()
    start = described.index(lines[0])
    assert described[start : start + len(lines)] == lines


def test_doctor_says_what_is_wrong_with_the_data_and_plans_the_model(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    settings = load_config(
        sets=[f"data.0.path='{tmp_path / 'nowhere.jsonl'}'", 'model.device="cpu"']
    )
    found = {what: (text, fine) for what, text, fine in examine(model, settings)}
    assert found["recipe"][0].startswith("refused: ") and "nowhere.jsonl" in found["recipe"][0]
    assert not found["recipe"][1] and found["fits"][1] and "time" not in found


# ---- the parts


def parts(*sets: str):
    return build_parts(check_run(small_config(*sets), even_digits))


def test_what_engine_or_learner_cannot_do_is_refused() -> None:
    made = parts("rollout.mode=stream")
    try:
        made.engine.can = frozenset({"keyed_noise"})
        with pytest.raises(WhetError, match="cannot do cut, stream"):
            refuse_unmet(made)
        made.engine.can = frozenset({"cut", "stream"})
        with pytest.raises(WhetError, match="cannot do keyed_noise"):
            refuse_unmet(made)
        del made.engine.can
        made.curriculum.needs = frozenset({"grad_sq"})
        with pytest.raises(WhetError, match="uniform needs grad_sq"):
            refuse_unmet(made)
    finally:
        made.close()


def test_a_gpu_that_is_too_small_is_refused_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU that need not be here, of which only the free bytes are asked."""

    def loaded(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("whet.model.load.pick_device", lambda model: torch.device("cuda"))
    monkeypatch.setattr("whet.model.load.load_model", loaded)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, 2**30))
    with pytest.raises(
        WhetError,
        match=r"^This training does not fit on the GPU: it takes .* more than the 0\.0 MiB",
    ):
        parts()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    with pytest.raises(AssertionError, match="weights were loaded"):
        parts()


def test_a_run_says_what_its_engine_has_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalEngine, "notes", lambda self: ["Rollouts are slow."])
    made = parts()
    made.close()
    assert made.notes == ("Rollouts are slow.",)


def test_evaluation_ids_meet_no_training_id_and_overlap_is_counted() -> None:
    settings = small_config()
    problems = load_problems(settings, even_digits)
    assert not [note for note in problems.notes if "also trained on" in note], (
        "the built-in task holds its evaluation problems out"
    )
    assert all(i.startswith("eval:held_out:") for i in problems.eval_by_id)
    assert not set(problems.train.ids) & set(problems.eval_by_id)


def test_rows_of_rollouts_say_what_was_asked_and_written() -> None:
    made = parts()
    try:
        made.engine.submit(made.curriculum.plan(made.clock()))
        rollouts = made.engine.collect()
        rows = made.rollout_rows(rollouts[:3])
        assert [row["response"] for row in rows] == [
            made.plan.codec.decode(r.trace.ids) for r in rollouts[:3]
        ]
        assert rows[0]["prompt"] == made.plan.problems.lookup(rollouts[0].prompt_id).text
        assert {"phase", "verdict", "reward", "answer", "length", "finish"} <= rows[0].keys()
    finally:
        made.close()


def test_worked_solutions_of_a_file_come_in_epochs(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{a}+1=", "answer": str(a + 1), "solution": f"#{a + 1}"}
        for a in range(100, 220)
    ]
    (tmp_path / "worked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = f"data.0={{path='{tmp_path / 'worked.jsonl'}'}}"
    made = parts(entry, "held_out.size=10", "eval=[]", "warm_start=[{steps=33, batch=10}]")
    try:
        batches = list(
            solution_batches(made, made.plan.settings.warm_start[0], np.random.default_rng(0))
        )
        drawn = [tuple(prompt) for batch in batches for prompt, _ in batch]
        trained = {tuple(made.plan.codec.encode(p)) for p in made.plan.problems.train}
        assert len(trained) == 110 and [len(batch) for batch in batches] == [10] * 33
        for start in (0, 110, 220):
            assert set(drawn[start : start + 110]) == trained, (
                "each once an epoch, and none that is held out"
            )
        assert drawn[:110] != drawn[110:220], "in another order"
    finally:
        made.close()


def test_a_tally_counts_cut_rollouts_in_full_and_a_continuation_as_no_new_visit() -> None:
    """The axis of every claim about tokens. Two prompts are visited, the first of them for 4 more rollouts later."""
    sampling = Sampling(max_tokens=8)
    asked = [
        Request(
            prompt_id=prompt, group_id=group, n=4, sampling=sampling, phase=phase, first_index=first
        )  # type: ignore[arg-type]
        for prompt, group, phase, first in (
            ("a", 0, "screen", 0),
            ("b", 1, "screen", 0),
            ("a", 0, "train", 4),
        )
    ]
    finished = [
        Rollout(
            prompt_id="a",
            group_id=0,
            index=index,
            phase="train",
            sampling=sampling,
            length=length,
            finish=finish,
            first_version=0,
            last_version=0,  # type: ignore[arg-type]
        )
        for index, (length, finish) in enumerate(
            ((5, "stop"), (8, "length"), (3, "cut"), (0, "cut"))
        )
    ]
    tally = Tally()
    tally.generated(asked, finished)
    assert (tally.prompts_seen, tally.rollouts, tally.tokens_generated) == (2, 4, 5 + 8 + 3)
