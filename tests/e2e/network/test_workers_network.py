"""Bad networks between the server and its workers: clients notice nothing but time."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from tests.e2e.network.faults import FAULTS, Fault, misbehave
from tests.e2e.network.load import Journal, Load
from tests.e2e.network.proxy import Proxy

import shapestream

pytestmark = pytest.mark.e2e

CONFIG = """\
    server:
      listen: [ipc://s.sock]
      worker_listen: "tcp://127.0.0.1:*"
      heartbeat_s: 0.2
      worker_silence_s: 1.0
    models:
      - name: noted
        function: noted:noted
        inputs: {x: {shape: "batch:1..8, n:2..100000", element_type: f64}}
        outputs: {y: {shape: "batch, n", element_type: f64, rule: rows}}
        trust: true   # a proof, and measuring, would be noted as well
        calibration_s: 0
    workers: []
"""
PATIENCE_S = 180.0
# A request whose attempts are lost is tried three times; then its client would hear `worker_lost`.
MOST_RUNS = 3


@pytest.mark.parametrize(("fault", "times"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_worker_whose_connection_fails_again_and_again_loses_no_request(
    workplace: Any, fault: Fault, times: int
) -> None:
    """Two workers behind a proxy each, which misbehave in turn: every request gets its own right answer, once.

    Where faults come this fast, one request may be lost three times: that is answered honestly, and rare.
    """
    config = workplace.write(CONFIG)
    served = workplace.serve(config)
    (ready,) = served.events("server ready")
    port = int(ready["workers"][0].rpartition(":")[2])

    async def main() -> None:
        proxies = [Proxy(port), Proxy(port)]
        async with trio.open_nursery() as nursery:
            for proxy, name in zip(proxies, ("left", "right"), strict=True):
                await nursery.start(proxy.run)
                workplace.start("worker", str(config), "--connect", proxy.address, "--name", name)
            with trio.fail_after(PATIENCE_S):
                await trio.to_thread.run_sync(served.wait_for, "worker joined", 2)
                async with shapestream.connect(served.address) as client:
                    load = Load(client, 1)
                    async with trio.open_nursery() as asking:
                        asking.start_soon(load.run)
                        hit = await misbehave(proxies, fault, times // 2, load)
                    outcomes = load.outcomes
                    assert (set(), [], []) == outcomes.defects[:3]
                    assert {"worker_lost"} >= outcomes.codes.keys()
                    assert len(outcomes.refused) <= len(outcomes.right) / 50
                    runs = Journal(served.folder).runs(outcomes)
                    assert runs.keys() >= outcomes.right
                    assert max(runs.values()) <= MOST_RUNS
                    assert times // 2 == hit
            nursery.cancel_scope.cancel()

    trio.run(main)
