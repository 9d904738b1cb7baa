"""What Ray costs on one card: figures of steps that lie side by side, and of publishes."""

import json
from pathlib import Path

from cluster_step import figures, publishes, ratio, start, take_turns, write_words

from whet.tools.bench.peers import shape_config


def test_steps_are_compared_with_those_beside_them() -> None:
    found = ratio([1.1, 2.2, 4.8], [1.0, 2.0, 4.0])  # a machine that becomes slower and slower
    assert found == {"median": 1.1, "quartiles": [1.1, 1.15], "of_medians": 1.1, "steps": 3}


def test_the_first_publishes_do_not_count(tmp_path: Path) -> None:
    assert publishes(tmp_path / "none") == {"median": {}, "all": []}
    rows = [{"version": n, "ms": 10.0 * n, "pack_ms": 1.0, "shared": True} for n in range(1, 6)]
    (tmp_path / "publish.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert publishes(tmp_path / "publish.jsonl") == {"median": {"ms": 40.0, "pack_ms": 1.0}, "all": rows}


def test_words_are_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    shape_config("1.5b").save_pretrained(tmp_path)  # a model type with a tokenizer class of its own
    words = AutoTokenizer.from_pretrained(write_words(640, tmp_path))
    digits = words("0123" * 16).input_ids
    assert len(digits) == 64 and digits[:4] == digits[4:8] and len(set(digits)) == 4
    assert words.eos_token_id == 639 and len(words) == 640
    assert words.decode([400, 401]) == "w400ww401", "numbers of letters are even and odd"


def test_a_run_that_fails_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    runner = start("one", tmp_path / "one", {"shape": "tiny", "weights": tmp_path / "nowhere", "steps": 3})
    take_turns([runner], 3, float("inf"), float("inf"))
    runner.close()
    found = figures([runner], "tiny")
    assert found["ratio"] == {} and found["predicted"] == []
    assert "nowhere" in found["arms"]["one"]["failed"]
