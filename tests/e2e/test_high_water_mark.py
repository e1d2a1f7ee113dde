"""Messages cross in both directions while every queue holds one message: no announcement of libzmq's is missed.

A receive, a send and a look at ZMQ_EVENTS all take the announcement of a message and that of room. Where a socket forgot to
look afterwards, one side would wait for ever. `MESSAGES=10000000` tries as many by hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from random import Random

import pytest
import trio

from shapestream.errors import OutboxFull, PeerGone
from shapestream.transport.interface import Addressed, Message, Wake
from shapestream.transport.router import RouterSocket
from shapestream.transport.zeromq import BlockingDealer, DealerSocket, SocketOptions

MESSAGES = int(os.environ.get("MESSAGES", "6000"))
"""Messages in each direction, for each kind of client and address."""
ONE_BY_ONE = max(1, MESSAGES // 2)
"""Messages of which each waits for the answer to the one before."""
UNANSWERED = 100
"""Messages that a client sends ahead of the answers: more than the queues hold, fewer than an outbox."""
PATIENCE_S = 60.0
"""Without news for so long, a side is deaf. It hears of thousands of messages per second."""


def _options(address: str) -> SocketOptions:
    # Only inproc takes a limit of the receiver's (`SocketOptions.apply`).
    return SocketOptions(high_water_mark=1, receive_high_water_mark=int(address.startswith("inproc")))


def _by_thread(address: str) -> list[int]:
    """The answers to a client without an event loop, such as that of the blocking face."""
    socket, wake, answers, sent = DealerSocket(options=_options(address)), Wake(), list[int](), 0
    socket.connect(address)
    while len(answers) < MESSAGES:
        has_room = True
        while has_room and sent < min(MESSAGES, len(answers) + UNANSWERED):
            try:
                socket.send_nowait([b"%d" % sent])
                sent += 1
            except trio.WouldBlock:
                has_room = False
        assert socket.wait(wake, PATIENCE_S, for_room=not has_room), f"{sent} sent, {len(answers)} answered"
        answers += [int(bytes(frames[0])) for frames in socket.receive_nowait()]
    socket.close()
    wake.close()
    return answers


def _by_slot(address: str) -> list[int]:
    """The answers to a thread that blocks on its socket, such as a worker's slot."""
    wake, answers, sent = Wake(), list[int](), 0
    socket = BlockingDealer(address, wake, options=_options(address))
    while len(answers) < MESSAGES:
        while sent < min(MESSAGES, len(answers) + UNANSWERED):
            assert socket.send([b"%d" % sent], PATIENCE_S), f"{sent} sent, {len(answers)} answered"
            sent += 1
        message = socket.receive(PATIENCE_S)
        assert message is not None, f"{sent} sent, {len(answers)} answered"
        answers.append(int(bytes(message[0])))
    socket.close()
    wake.close()
    return answers


def _by_tasks(address: str) -> list[int]:
    """The answers to a client in an event loop: one task sends and another one receives."""
    answers: list[int] = []

    async def main() -> None:
        permits = trio.Semaphore(UNANSWERED)

        async def send() -> None:
            for number in range(MESSAGES):
                await permits.acquire()
                await socket.send([b"%d" % number])

        async with DealerSocket(options=_options(address)) as socket, trio.open_nursery() as nursery:
            socket.connect(address)
            await nursery.start(socket.run)
            nursery.start_soon(send)
            while len(answers) < MESSAGES:
                came: list[Message] = []
                with trio.move_on_after(PATIENCE_S):
                    came = await socket.receive()
                assert came, (
                    f"{len(answers)} answered; the connection {'broke' if socket.broke else 'is whole'}"
                )
                for frames in came:
                    answers.append(int(bytes(frames[0])))
                    permits.release()
            nursery.cancel_scope.cancel()

    trio.run(main)
    return answers


@pytest.mark.parametrize("client", [_by_thread, _by_slot, _by_tasks], ids=["thread", "slot", "tasks"])
@pytest.mark.parametrize(
    "place", ["ipc://{}/s", "tcp://127.0.0.1:*", "inproc://mark-{}"], ids=["ipc", "tcp", "inproc"]
)
def test_every_message_is_answered(tmp_path: Path, place: str, client: Callable[[str], list[int]]) -> None:
    """The server answers half of the messages in the task that reads them, and half in another task."""
    answered: list[list[int]] = []
    gone: list[str] = []

    async def serve() -> None:
        later_in, later = trio.open_memory_channel[Addressed](UNANSWERED)

        def send(peer: bytes, frames: Message) -> None:
            # A client that gives up closes its connection before its error arrives here. It is its error that counts.
            try:
                router.send_nowait(peer, frames)
            except PeerGone as error:
                gone.append(f"{error}, at the answer to {bytes(frames[0])!r}")

        def answer() -> None:
            for number, (peer, frames) in enumerate(router.receive_nowait()):
                if number % 2:
                    later_in.send_nowait((peer, frames))
                else:
                    send(peer, frames)

        async def answer_later() -> None:
            async for peer, frames in later:
                send(peer, frames)

        async def receive() -> None:
            while True:
                for peer, frames in await router.receive():
                    send(peer, frames)

        address = place.format(str(tmp_path).replace("/", "-") if place.startswith("inproc") else tmp_path)
        async with RouterSocket(options=_options(address)) as router, trio.open_nursery() as nursery:
            router.bind(address)
            router.on_messages = answer
            await nursery.start(router.run)
            nursery.start_soon(answer_later)
            nursery.start_soon(receive)
            answered.append(
                await trio.to_thread.run_sync(client, router.addresses[0], abandon_on_cancel=True)
            )
            nursery.cancel_scope.cancel()

    trio.run(serve)
    assert [list(range(MESSAGES))] == [sorted(answers) for answers in answered]
    assert [] == gone


async def _chatter(send: Callable[[], None]) -> None:
    """Send for ever, a few messages in each turn of the event loop, some time after it has looked for news."""
    while True:
        sum(range(2000))
        for _ in range(3):
            with suppress(trio.WouldBlock, OutboxFull, PeerGone):
                send()
        await trio.lowlevel.checkpoint()


def _ask_one_by_one(address: str) -> list[int]:
    """Send a number, wait for its return, and send the next one; other messages are ignored."""
    returned: list[int] = []
    wake = Wake()
    with closing(BlockingDealer(address, wake, options=SocketOptions())) as socket:
        for number in range(ONE_BY_ONE):
            assert socket.send([b"%d" % number], PATIENCE_S)
            answer = b""
            while not answer:
                message = socket.receive(PATIENCE_S)
                assert message is not None, f"no answer to {number}"
                answer = bytes(message[0])
            returned.append(int(answer))
    wake.close()
    return returned


@pytest.mark.parametrize("in_watcher", [True, False], ids=["watcher", "receiver"])
def test_a_server_hears_a_lone_message_while_it_sends(tmp_path: Path, in_watcher: bool) -> None:
    """Each message is the only one on its way: what the sends take from libzmq is announced by no later one."""
    returned: list[int] = []

    async def serve() -> None:
        def answer(messages: list[Addressed]) -> None:
            for peer, frames in messages:
                if not peers:
                    nursery.start_soon(_chatter, partial(router.send_nowait, peer, [b""]))
                peers.add(peer)
                router.send_nowait(peer, frames)

        async def receive() -> None:
            while True:
                answer(await router.receive())

        peers: set[bytes] = set()
        address = f"ipc://{tmp_path}/s"
        async with RouterSocket(options=SocketOptions()) as router, trio.open_nursery() as nursery:
            router.bind(address)
            if in_watcher:
                router.on_messages = lambda: answer(router.receive_nowait())
            await nursery.start(router.run)
            nursery.start_soon(receive)
            returned.extend(await trio.to_thread.run_sync(_ask_one_by_one, address, abandon_on_cancel=True))
            nursery.cancel_scope.cancel()

    trio.run(serve)
    assert list(range(ONE_BY_ONE)) == returned


def _echo_in_tasks(address: str) -> None:
    """Return each message up to the first empty one, in one task, while another task sends."""

    async def main() -> None:
        async with DealerSocket() as socket, trio.open_nursery() as nursery:
            socket.connect(address)
            await nursery.start(socket.run)
            nursery.start_soon(_chatter, partial(socket.send_nowait, [b""]))
            while True:
                for frames in await socket.receive():
                    if not frames[0]:
                        nursery.cancel_scope.cancel()
                    await socket.send(frames)

    trio.run(main)


def _echo_in_thread(address: str) -> None:
    """Return each message up to the first empty one, without an event loop, and send others before the next wait."""
    wake, numbers, ended = Wake(), Random(1), False
    with closing(DealerSocket()) as socket:
        socket.connect(address)
        socket.send_nowait([b""])
        while not ended:
            assert socket.wait(wake, PATIENCE_S, for_room=False)
            for frames in socket.receive_nowait():
                ended |= not frames[0]
                for message in [frames, *[[b""]] * numbers.randrange(60)]:
                    with suppress(trio.WouldBlock):
                        socket.send_nowait(message)
    wake.close()


@pytest.mark.parametrize("client", [_echo_in_tasks, _echo_in_thread], ids=["tasks", "thread"])
def test_a_client_hears_a_lone_message_while_it_sends(tmp_path: Path, client: Callable[[str], None]) -> None:
    """As in the test above, the other way round."""
    returned: list[int] = []

    async def ask(router: RouterSocket) -> None:
        peer, _ = (await router.receive())[0]
        for number in range(ONE_BY_ONE):
            router.send_nowait(peer, [b"%d" % number])
            answer = b""
            while not answer:
                with trio.fail_after(PATIENCE_S):
                    for _, frames in await router.receive():
                        answer = answer or bytes(frames[0])
            returned.append(int(answer))
        router.send_nowait(peer, [b""])

    async def serve() -> None:
        address = f"ipc://{tmp_path}/s"
        async with RouterSocket() as router, trio.open_nursery() as nursery:
            router.bind(address)
            await nursery.start(router.run)
            nursery.start_soon(ask, router)
            await trio.to_thread.run_sync(client, address, abandon_on_cancel=True)
            nursery.cancel_scope.cancel()

    trio.run(serve)
    assert list(range(ONE_BY_ONE)) == returned
