"""How long the analysis notebooks take on a committed default run, against the time promised.

    python tests/benchmarks/bench_notebooks.py

The run is copied first, so that nothing is read from an earlier analysis; starting the kernel and the imports are counted.
"""

import shutil
import tempfile
import time
from pathlib import Path

import papermill
from record import record

from vitposnb.config import project_root

PROMISED = {"geometry": ("rope-s0", 60), "robustness": ("ape-s0", 180), "position": ("rope-s0", 240), "features": ("ape-s0", 240)}


def main():
    root = project_root()
    for name, (run, seconds) in PROMISED.items():
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "default" / run
            shutil.copytree(root / "runs" / "default" / run, copy, ignore=shutil.ignore_patterns(f"{name}*"))
            start = time.perf_counter()
            papermill.execute_notebook(root / "nbs" / f"{name}.ipynb", Path(folder) / "out.ipynb", dict(run=str(copy)), cwd=root)
            record(f"{name}.ipynb on default/{run}", f"{seconds} seconds", (time.perf_counter() - start) / seconds, 1.0)


if __name__ == "__main__":
    main()
