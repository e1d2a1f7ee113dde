"""A network that is gone without a word, in a namespace of its own: the kernel closes the connections over it."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from tests.e2e.conftest import PATIENCE_S

pytestmark = pytest.mark.e2e

SCRIPT = """
import subprocess, trio
from shapestream.errors import PeerGone
from shapestream.transport.zeromq import DealerSocket
from shapestream.transport.router import RouterSocket

def link(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

async def main():
    link("up")
    async with RouterSocket() as router, DealerSocket() as dealer, trio.open_nursery() as nursery:
        router.bind("tcp://127.0.0.1:*")
        await nursery.start(router.run)
        dealer.connect(router.addresses[0])
        dealer.send_nowait([b"hello"])
        ((peer, _),) = await router.receive()
        link("down")
        try:
            while True:
                await trio.sleep(0.5)
                router.send_nowait(peer, [b"are you there?"])
        except PeerGone:
            print("gone")
        nursery.cancel_scope.cancel()

trio.run(main)
"""


def test_a_connection_over_a_dead_network_is_closed() -> None:
    """No reset and no end comes, and libzmq sends no heartbeats: the other side is found to be gone all the same."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs unshare and ip")
    if subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this user may not make network namespaces")
    ran = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "gone" == ran.stdout.strip(), ran.stderr
