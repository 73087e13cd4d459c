"The table that every benchmark writes its row to."

from pathlib import Path

import pandas as pd

from vitposnb.config import project_root
from vitposnb.runs import replacing

COLUMNS = ["name", "baseline", "ratio", "limit", "holds"]


def record(
    name: str,  # what was measured; a row of the same name is replaced
    baseline: str,  # what it is compared with, in the same run
    ratio: float,  # ours over the baseline
    limit: float,  # the promised bound
    at_most: bool = True,  # whether the bound is an upper one
) -> None:
    "Print a ratio and put it into runs/bench/bench.csv."
    path: Path = project_root() / "runs" / "bench" / "bench.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=COLUMNS)
    holds = ratio <= limit if at_most else ratio >= limit
    row = pd.DataFrame([[name, baseline, round(ratio, 4), limit, holds]], columns=COLUMNS)
    with replacing(path) as temporary:
        pd.concat([table[table["name"] != name], row]).sort_values("name").to_csv(temporary, index=False)
    print(f"{name}: {ratio:.3f} x {baseline} (promised {'at most' if at_most else 'at least'} {limit}): {'holds' if holds else 'FAILS'}")
