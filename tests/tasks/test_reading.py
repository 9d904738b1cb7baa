import gzip
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whet.errors import WhetError
from whet.tasks.reading import join_sheets, pick_split, read_file, read_hub, read_path
from whet.tasks.text import is_small

ROWS = [
    {"prompt": "a", "reward_model": {"ground_truth": "1", "style": "rule"}},
    {"prompt": "b", "reward_model": None},
]
FLAT = {
    "prompt": ["a", "b"],
    "reward_model.ground_truth": ["1", None],
    "reward_model.style": ["rule", None],
}


def columns(sheet) -> dict:
    return {name: sheet.column(name) for name in sheet.names}


def refused(path: Path) -> str:
    with pytest.raises(WhetError) as error:
        read_path(path, ["train"])
    return str(error.value).replace(str(path), "FILE")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def lines(rows) -> str:
    return "\n".join(map(json.dumps, rows)) + "\n"


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
def test_parquet(tmp_path, compression) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, compression=compression)
    sheet = read_file(path)
    assert (
        columns(sheet) == FLAT and sheet.rows == 2 and not sheet.holes and sheet.place(1) == "row 2"
    )


def test_parquet_columns_of_every_kind(tmp_path) -> None:
    path = tmp_path / "p.parquet"
    words = pa.array(["x", "y", "x"]).dictionary_encode()
    table = pa.table(
        {
            "chat": [[{"role": "user", "content": "?"}]] * 3,
            "word": words,
            "large": pa.array(["a", None, "b"], pa.large_string()),
            "long": ["z" * 101, "", None],
            "number": pa.array([1, 2, None], pa.int32()),
            "flag": [True, False, None],
            "list": [["a"], [], None],
        }
    )
    pq.write_table(table, path)
    sheet = read_file(path)
    assert sheet.column("word") == ["x", "y", "x"] and sheet.column("chat")[0] == [
        {"role": "user", "content": "?"}
    ]
    assert [name for name in sheet.names if is_small(sheet.column(name))] == [
        "word",
        "large",
        "number",
        "flag",
    ]


def test_json_lines_and_lists_say_the_same(tmp_path) -> None:
    sheets = [
        read_file(write(tmp_path / "a.jsonl", "\n" + lines(ROWS).replace("\n", "\n\n"))),
        read_file(write(tmp_path / "b.json", json.dumps(ROWS, indent=1))),
        read_file(write(tmp_path / "c.json", lines(ROWS))),
    ]
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as file:
        file.write(lines(ROWS))
    sheets.append(read_file(tmp_path / "d.jsonl.gz"))
    for sheet in sheets:
        got = columns(sheet)
        # the null itself, beside the struct's columns
        assert got.pop("reward_model") == [None, None]
        assert got == FLAT
    assert [sheet.place(1) for sheet in sheets] == ["line 4", "row 2", "line 2", "line 2"]


def test_holes_are_rows_without_the_key(tmp_path) -> None:
    sheet = read_file(write(tmp_path / "a.jsonl", lines([{"a": None}, {"a": 1, "b": 2}, {"b": 3}])))
    assert columns(sheet) == {"a": [None, 1, None], "b": [None, 2, 3]} and sheet.holes == {
        "a": 2,
        "b": 0,
    }


def test_small_columns_of_json(tmp_path) -> None:
    rows = [
        {"n": 1, "t": "x", "long": "y" * 101, "list": [1], "flag": True},
        {"n": 2.5, "t": None, "long": "", "list": 1},
    ]
    sheet = read_file(write(tmp_path / "a.jsonl", lines(rows)))
    assert [name for name in sheet.names if is_small(sheet.column(name))] == ["n", "t", "flag"]


def test_objects_with_no_end_of_keys(tmp_path) -> None:
    """Wide rows must not cost rows x keys."""
    sheet = read_file(
        write(tmp_path / "a.jsonl", lines({"prompt": "a", f"k{i}": i} for i in range(1000)))
    )
    assert len(sheet.names) == 256 and sheet.rows == len(sheet.column("prompt")) == 1000


def test_folders(tmp_path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train-00000-of-00002.jsonl", lines([{"a": 1}]))
    write(tmp_path / "data" / "train-00001-of-00002.jsonl", lines([{"a": 2}, {"b": 3}]))
    write(tmp_path / "test.json", '[{"a": 4}]')
    write(tmp_path / "dataset_infos.json", "{}")
    train = read_path(tmp_path, ["train"])
    assert columns(train) == {"a": [1, 2, None], "b": [None, None, 3]} and train.holes == {
        "a": 2,
        "b": 0,
    }
    assert train.place(2) == "train-00001-of-00002.jsonl, line 2" and train.origin == str(tmp_path)
    assert read_path(tmp_path, ["eval", "test"]).column("a") == [4]
    with pytest.raises(
        WhetError, match=r"holds no file of the split validation; it holds data|train-00000"
    ):
        read_path(tmp_path, ["validation"])


def test_a_folder_without_splits_is_read_whole(tmp_path) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        write(tmp_path / name, lines([{"x": name}]))
    assert read_path(tmp_path, ["test"]).column("x") == ["a.jsonl", "b.jsonl"]


def test_folders_saved_by_datasets(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list([{"prompt": "a", "answer": "1"}])
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(
        {"train": one, "test": datasets.Dataset.from_list([{"prompt": "b"}])}
    ).save_to_disk(str(tmp_path / "two"))
    assert read_path(tmp_path / "one", ["train"]).column("answer") == ["1"]
    assert read_path(tmp_path / "two", ["eval", "test"]).column("prompt") == ["b"]
    with pytest.raises(WhetError, match="has no split dev; it has train, test: set split"):
        read_path(tmp_path / "two", ["dev"])


def test_datasets_reads_a_local_folder_by_the_hubs_way(monkeypatch) -> None:
    """`read_hub` with everything but the network: `datasets` takes a folder for a name."""
    pytest.importorskip("datasets")
    # datasets finds splits by words in the whole path, such as a test's name
    with TemporaryDirectory() as name:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path(name) / "cache")
        corpus = Path(name) / "corpus"
        corpus.mkdir()
        write(corpus / "train.jsonl", lines([{"question": "a", "answer": "x\n#### 1"}] * 3))
        write(corpus / "validation.jsonl", lines([{"question": "b", "answer": "2"}]))
        assert read_hub(str(corpus), "", "", ["train"]).column("question") == ["a"] * 3
        assert read_hub(str(corpus), "", "", ["test", "validation"]).column("answer") == ["2"]
        assert read_hub(str(corpus), "", "train[:2]", ["train"]).rows == 2
        with pytest.raises(WhetError, match="could not be fetched: ValueError: Unknown split"):
            read_hub(str(corpus), "", "nosuch", [])


def test_the_only_split_is_taken() -> None:
    assert pick_split(["train"], ["test"], "x") == "train"
    with pytest.raises(
        WhetError, match="x has no split test or eval; it has train, dev: set split"
    ):
        pick_split(["train", "dev"], ["test", "eval"], "x")


def test_joined_sheets_know_their_places(tmp_path) -> None:
    parts = [read_file(write(tmp_path / f"{n}.jsonl", lines([{"a": n}] * n))) for n in (1, 2, 3)]
    joined = join_sheets(parts, "all")
    assert joined.column("a") == [1, 2, 2, 3, 3, 3] and joined.rows == 6
    assert [joined.place(i) for i in (0, 1, 5)] == [
        "1.jsonl, line 1",
        "2.jsonl, line 1",
        "3.jsonl, line 3",
    ]


def test_missing_libraries_are_one_sentence(tmp_path, monkeypatch) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "p.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert (
        refused(tmp_path / "p.parquet")
        == 'Reading FILE needs the package pyarrow: pip install "whet[data]".'
    )
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        WhetError,
        match=r'^Fetching a/b from the hub needs the package datasets: pip install "whet\[data',
    ):
        read_hub("a/b", "", "", ["train"])


def test_bad_files(tmp_path) -> None:
    assert refused(tmp_path / "no.jsonl") == refused(tmp_path / "no.parquet").replace(
        "parquet", "jsonl"
    )
    assert refused(tmp_path / "no.jsonl") == "There is no data file at FILE."
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty").startswith("FILE holds no .parquet, .jsonl")
    assert (
        refused(write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": }\n'))
        == "FILE, line 2 is not JSON: Expecting value at column 7."
    )
    assert refused(write(tmp_path / "b.jsonl", "{}\n[1]\n")).startswith(
        "FILE, line 2 is no JSON object"
    )
    assert refused(write(tmp_path / "c.json", '[{"a": 1}, 2]')).startswith(
        "FILE, row 2 is no JSON object"
    )
    assert refused(write(tmp_path / "d.json", '[{"a": 1}')).startswith(
        "FILE is not JSON: Expecting ',' delimiter at line 1"
    )
    assert refused(write(tmp_path / "e.parquet", "PAR1 not at all")).startswith(
        "FILE is no parquet file that can be read"
    )
    assert refused(write(tmp_path / "f.jsonl.gz", "plain")).startswith(
        "The data file FILE cannot be read"
    )
    (tmp_path / "g.jsonl").write_bytes(b'{"a": "b"}\n\xff\xfe\n')
    assert refused(tmp_path / "g.jsonl") == "FILE is not UTF-8 text."
    assert refused(write(tmp_path / "h.jsonl", "[" * 200_000)).startswith(
        "FILE, line 1 cannot be read: "
    )
    assert refused(write(tmp_path / "i.jsonl", '{"a": ' + "9" * 5000 + "}")).startswith(
        "FILE, line 1 cannot be read: "
    )


def test_a_byte_order_mark_is_no_problem(tmp_path) -> None:
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"a": "b"}\r\n')
    assert columns(read_file(tmp_path / "bom.jsonl")) == {"a": ["b"]}


def test_what_has_no_end_is_refused(tmp_path) -> None:
    """A pipe, which nobody writes to, and a device that never ends."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    sentence = "FILE is a device or a pipe, not a file; write its content to a file first."
    assert refused(tmp_path / "pipe.jsonl") == refused(Path("/dev/zero")) == sentence


@pytest.mark.parametrize(
    ("name", "argument"), [("a.csv", ""), ("a.CSV", ""), ("a.tsv", ', sep="\\t"')]
)
def test_csv_is_refused_with_the_way_to_convert_it(tmp_path, monkeypatch, name, argument) -> None:
    """The way is the one that works."""
    pandas = pytest.importorskip("pandas")
    separator = "\t" if argument else ","
    write(tmp_path / name, f"prompt{separator}answer\n1+1={separator}2\n")
    command = (
        f'pandas.read_csv("{name}"{argument}).to_json("a.jsonl", orient="records", lines=True)'
    )
    sentence = (
        f"FILE is CSV, but whet reads JSONL, JSON and parquet; in Python, {command} converts it."
    )
    assert refused(tmp_path / name) == sentence
    monkeypatch.chdir(tmp_path)
    eval(command, {"pandas": pandas})
    assert columns(read_file(tmp_path / "a.jsonl")) == {"prompt": ["1+1="], "answer": [2]}


def test_a_file_of_an_unknown_kind_names_the_known_ones(tmp_path) -> None:
    said = refused(write(tmp_path / "a.txt", "prompt: answer\n"))
    assert said.startswith("FILE, line 1 is not JSON: ") and said.endswith(
        "; whet reads JSONL, JSON and parquet."
    )
    assert read_file(write(tmp_path / "b.txt", '{"a": 1}\n')).rows == 1
