"""No test asserts a time: clocks are read, and threads sleep, in the files named here, each for its reason.

The clock of trio is not looked for: it is mostly the virtual one (tests/pipeline/serving/clocks.py).
"""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
READS = {
    f"{name}{unit}"
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    for unit in ("", "_ns")
} | {"sleep"}
"""Names of `time` that a test may not use without a reason. `sleep` is free in e2e, which waits for processes."""
A_TIME_THAT_IS_GIVEN = "a deadline, or the age of a record, that is handed to what is tested"
PATIENCE = "the end of patience with a process: evidence comes first"
ALLOWED = {
    "engine/importable/breakable.py": "a model that takes long, while the test stops it",
    "engine/test_batch_run.py": A_TIME_THAT_IS_GIVEN,
    "engine/test_slot.py": A_TIME_THAT_IS_GIVEN,
    "engine/test_tokenizer.py": "sleep(0), to give the GIL up",
    "engine/wrong_models/careful.py": "a model that hangs",
    "engine/wrong_models/__main__.py": "a program of its own; it tells how long it took",
    "pipeline/client/test_clock_that_stood_still.py": "a clock that a client runs on",
    "pipeline/serving/test_slot_threads.py": A_TIME_THAT_IS_GIVEN,
    "pipeline/transport/test_curve.py": "lets libzmq begin a handshake while the loop stands still; nothing counts on it",
    "progress.py": "tells how far a run is",
    "tools/page.py": "`make test-tools`",
    "tools/ray_data.py": "`make ray`: figures are printed",
    "workers/test_costs.py": A_TIME_THAT_IS_GIVEN,
    "zoo/test_zoo.py": "`make zoo`: rates are printed",
    "e2e/answers/raw_client.py": PATIENCE,
    "e2e/answers/run.py": PATIENCE,
    "e2e/chaos/client.py": "entries of the ledger",
    "e2e/chaos/faults.py": "entries of the ledger",
    "e2e/chaos/ledger.py": PATIENCE,
    "e2e/chaos/model.py": "entries of the ledger",
    "e2e/chaos/performance.py": "`make chaos`: how long it runs",
    "e2e/chaos/stage.py": PATIENCE,
    "e2e/conftest.py": PATIENCE,
    "e2e/importable/gated.py": PATIENCE,
    "e2e/network/rollout.py": "the longest wait of a caller, which is printed",
    "e2e/network/test_network.py": "entries of the ledger",
    "e2e/soak.py": "`make soak`: how long it runs",
    "e2e/test_broken_connections.py": "how long a peer sends before its connection is taken for full",
    "e2e/test_grpc_bad_input.py": "compared to the hour: it is no other epoch or unit",
    "e2e/test_proof.py": PATIENCE,
    "e2e/test_stats.py": PATIENCE,
    "e2e/test_stories.py": "how long a flood lasts",
}


def clocks_of(path: Path) -> set[str]:
    """The names of `time` that a file uses."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr=name):
                found.add(name)
            case ast.ImportFrom(module="time", names=names):
                found |= {alias.name for alias in names}
    return found & (READS - {"sleep"} if path.is_relative_to(TESTS / "e2e") else READS)


def test_clocks_are_read_where_there_is_a_reason() -> None:
    """Each file that reads one is named above, and each that is named reads one."""
    files = {str(path.relative_to(TESTS)): clocks_of(path) for path in TESTS.rglob("*.py")}
    assert sorted(ALLOWED) == sorted(name for name, clocks in files.items() if clocks)
