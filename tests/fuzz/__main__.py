"""`python -m tests.fuzz [TARGET ...] --seconds N`: fuzzes each target for its share of the time, from its corpus on.

Needs `atheris` (the extra `fuzz`). What it learns is kept in build/fuzz/TARGET, and goes on from there the next time;
an input that broke something is kept there as `crash-…`, and belongs into tests/fuzz/corpus once its defect is mended.
Each target runs in a process of its own: the first defect ends it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
LEARNT = Path("build/fuzz")


def fuzz(name: str, seconds: int) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(
        include=["shapestream", "shapestream_engine", "yaml"], enable_loader_override=False
    ):
        from tests.fuzz.targets import TARGETS

    learnt = LEARNT / name
    learnt.mkdir(parents=True, exist_ok=True)
    arguments = [
        sys.argv[0],
        f"-max_total_time={seconds}",
        "-max_len=8192",
        "-timeout=10",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        "-verbosity=0",
        f"-artifact_prefix={learnt}/",
        str(learnt),
        str(CORPUS / name),
    ]
    atheris.Setup(arguments, TARGETS[name])
    atheris.Fuzz()


def main() -> int:
    """One child after the other; 1 if any found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", nargs="*", help="default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.target or sorted(path.name for path in CORPUS.iterdir())
    if options.child:
        fuzz(names[0], options.seconds)
    share = max(1, options.seconds // len(names))
    broken = []
    for name in names:
        command = [sys.executable, "-m", "tests.fuzz", name, "--child", "--seconds", str(share)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=share + 120, check=False)
        lines = [line for line in ran.stderr.splitlines() if "number_of_executed_units" in line]
        runs = lines[-1].split()[-1] if lines else "?"
        print(f"{name}: {runs} runs in {share} s, {'broken' if ran.returncode else 'no defect'}", flush=True)
        if ran.returncode:
            broken.append(name)
            print(ran.stderr[-4_000:])
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
