"""A folder of pictures through a model by `shapestream run`, into a Parquet file.

    python -m examples.files.run [--quick]

The first run is killed when half of the rows are in parts; `--resume` goes on with it. Each row is compared with OpenVINO's
answer for that picture alone. The exit status says whether all was right, and each row there once.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

import numpy as np
from PIL import Image
from pyarrow import parquet

from examples.embedded.crops import CONFIG, ROOT, alone, make_crops, wrong

FOLDER = ROOT / ".cache" / "files"
PICTURES, RESULTS = FOLDER / "crops", FOLDER / "edges.parquet"
PATIENCE_S = 300.0
SMALL_PARTS = (
    "import sys; from shapestream_workers.offline import job; job.PART_ROWS = int(sys.argv.pop(1)); "
)
"""The program with parts of so few rows that there are several of this small folder."""


def command(part_rows: int, *more: str) -> list[str]:
    """`shapestream run` over the folder."""
    program = SMALL_PARTS + "from shapestream_workers.cli import main; main()"
    arguments = ["run", str(CONFIG), "recogniser", str(PICTURES), str(RESULTS), "--picture", "l,chw", *more]
    return [sys.executable, "-c", program, str(part_rows), *arguments]


def run_and_kill(rows: int) -> int:
    """Run, kill the process when half of the rows are done, and return the rows that are in parts."""
    parts = RESULTS.with_name(f"{RESULTS.name}.parts")
    part_rows = max(1, rows // 8)
    process = subprocess.Popen(command(part_rows, "--in-flight", "4"))
    give_up_at = time.monotonic() + PATIENCE_S
    kept = 0
    while process.poll() is None and kept < rows // 2 and time.monotonic() < give_up_at:
        time.sleep(0.002)
        kept = sum(int(path.name.split("-")[1]) for path in parts.glob("0*-*.parquet"))
    process.kill()
    process.wait()
    return kept


def main() -> int:
    """Runs the example; 0 if every row was right."""
    crops = make_crops(per_size=4 if "--quick" in sys.argv[1:] else 40)
    shutil.rmtree(FOLDER, ignore_errors=True)
    PICTURES.mkdir(parents=True)
    for number, crop in enumerate(crops):
        Image.fromarray(crop[0]).save(PICTURES / f"{number:05}.png")
    kept = run_and_kill(len(crops))
    if RESULTS.exists():
        print("it was done before it was killed")
    else:
        print(f"killed when {kept} of {len(crops)} rows were in parts; --resume goes on")
        subprocess.run(command(len(crops), "--resume"), check=True)
    table = parquet.read_table(RESULTS).to_pydict()
    keys = [f"{number:05}.png" for number in range(len(crops))]
    differ = wrong([np.array(edges, np.float32) for edges in table["edges"]], alone(crops))
    if differ or keys != table["key"] or any(table["error"]):
        print(f"FAILED: {differ} answers are wrong")
        return 1
    print(f"OK: {len(crops)} rows in {RESULTS}, each once, in order, and the answer of the picture alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
