import json
import sys

import pytest

from whet.config import Data, Eval
from whet.errors import WhetError
from whet.tasks.text import NAMES, open_data


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WHET_DATA", raising=False)


def put(folder, *names: str) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    for name in names:
        (folder / name).write_text(json.dumps({"prompt": name, "answer": "1"}) + "\n")


def found(entry, folder="data") -> str:
    return open_data(entry, str(folder))[0].column("prompt")[0]


def refused(entry, folder="") -> str:
    with pytest.raises(WhetError) as error:
        open_data(entry, str(folder))
    return str(error.value)


def test_short_names_in_a_folder(tmp_path) -> None:
    put(tmp_path / "data", "train_gsm8k.jsonl", "eval_gsm8k.jsonl", "train_math7500.jsonl", "math5000_test.jsonl")
    put(tmp_path / "data", "eval_amc2023.jsonl", "eval_amc23_40.jsonl", "eval_aime2024.jsonl", "deepscaler.jsonl")
    assert found(Data(path="gsm8k")) == "train_gsm8k.jsonl"
    assert found(Eval(path="gsm8k")) == found(Data(path="gsm8k", split="test")) == "eval_gsm8k.jsonl"
    assert found(Eval(path="gsm8k", split="train")) == "train_gsm8k.jsonl"
    assert found(Data(path="math")) == "train_math7500.jsonl" and found(Eval(path="math")) == "math5000_test.jsonl"
    assert found(Eval(path="amc23")) == "eval_amc23_40.jsonl", "the 40 problems before the 83"
    assert found(Data(path="aime24")) == "eval_aime2024.jsonl", "the only split there is"
    assert found(Eval(path="deepscaler")) == "deepscaler.jsonl"


def test_a_folder_of_a_short_name(tmp_path) -> None:
    put(tmp_path / "data" / "gsm8k", "train.jsonl", "test.jsonl")
    assert found(Data(path="gsm8k")) == "train.jsonl" and found(Eval(path="gsm8k")) == "test.jsonl"


def test_the_folder_may_come_from_the_environment(tmp_path, monkeypatch) -> None:
    put(tmp_path / "here", "eval_math500.jsonl")
    put(tmp_path / "there", "test_math500.jsonl")
    monkeypatch.setenv("WHET_DATA", str(tmp_path / "there"))
    assert found(Eval(path="math500"), "") == "test_math500.jsonl"
    assert found(Eval(path="math500"), tmp_path / "here") == "eval_math500.jsonl"


def test_neither_a_folder_nor_the_hub(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    sentence = refused(Data(path="gsm8k"))
    assert sentence == (
        "gsm8k: data_folder (or $WHET_DATA) names no folder with train_gsm8k.parquet (or .jsonl), and from the hub: "
        'Fetching openai/gsm8k from the hub needs the package datasets: pip install "whet[data]".'
    )
    (tmp_path / "data").mkdir()
    sentence = refused(Eval(path="gsm8k"), tmp_path / "data")
    assert f"{tmp_path / 'data'} holds no" in sentence and "test_gsm8k.parquet" in sentence and "whet[data]" in sentence
    assert refused(Data(path="gsm8k"), tmp_path / "no").startswith(f"There is no data folder at {tmp_path / 'no'}")


def test_a_network_that_is_not_there(monkeypatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    sentence = refused(Data(path="gsm8k"))
    assert "openai/gsm8k could not be fetched" in sentence and "$WHET_DATA" in sentence and "\n" not in sentence
    assert refused(Data(path="some/where")).startswith("some/where could not be fetched")


def test_wrong_names(tmp_path) -> None:
    assert 'no file or short name "gsm8"' in refused(Data(path="gsm8")) and 'mean "gsm8k"?' in refused(
        Data(path="gsm8")
    )
    assert refused(Data(path="x/y.jsonl")) == "There is no data file at x/y.jsonl."
    assert refused(Data(path="./x")) == "There is no data file at x."
    nowhere = str(tmp_path / "x" / "y")
    assert refused(Data(path=nowhere)) == f"There is no data file at {nowhere}."
    assert refused(Data(path="math500", split="train")) == "math500 has no split train; it has test."
    assert refused(Data(path="")).startswith("Task text needs data.path")


def test_a_folder_beside_a_short_name(tmp_path) -> None:
    """Short names win; a folder of that name is written ./math."""
    put(tmp_path / "math", "mine.jsonl")
    put(tmp_path / "data", "train_math.jsonl")
    assert found(Data(path="math")) == "train_math.jsonl" and found(Data(path="./math")) == "mine.jsonl"


def test_the_table_of_names() -> None:
    assert set(NAMES) == {
        "gsm8k", "math", "math500", "aime24", "aime25", "amc23", "minerva", "olympiad", "dapo17k", "deepscaler",
    }  # fmt: skip
    for known in NAMES.values():
        assert known.hub.count("/") == 1 and known.stems and set(known.splits) <= {"train", "test"}
