"""FastCuRL's split of a problem set by the length of its problems: how many are short, long and all.

    python benchmarks/split.py --data train_deepscaler40k.parquet --out benchmarks/results

On DeepScaleR-40K the rule gives the published L1, L2 and L3 (24,976, 40,315 and 15,339 problems). A column `subset`
with L1 and L3, where there is one, is compared row by row. Rows without an answer count, as they did there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from whet.curriculum.stages import short_by_characters
from whet.tools.bench.stand import circumstances


def split(path: Path, column: str) -> dict[str, Any]:
    table = pq.read_table(path)
    problems = table.column(column).to_pylist()
    characters = np.array([len(problem) for problem in problems])
    short = short_by_characters(characters)
    row: dict[str, Any] = {
        "file": path.name,
        "column": column,
        "mean_characters": round(float(characters.mean()), 2),
        "short": int(short.sum()),
        "all": len(short),
        "long": int((~short).sum()),
        "longest_short": int(characters[short].max()),
        "shortest_long": int(characters[~short].min()) if not short.all() else None,
    }
    if "answer" in table.column_names:
        row["without_answer"] = sum(not answer for answer in table.column("answer").to_pylist())
    if "subset" in table.column_names:
        published = np.array(table.column("subset").to_pylist())
        row["differ_from_published"] = int(((published == "L1") != short).sum())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="A parquet file.")
    parser.add_argument("--column", default="problem")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    row = split(options.data, options.column)
    print(json.dumps(row))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "split.json").write_text(json.dumps({**circumstances(), **row}, indent=1) + "\n")


if __name__ == "__main__":
    main()
