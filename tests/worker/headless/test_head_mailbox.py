"""A headless engine's end of the line: the messages that it gets, and every way in which it loses
its head.
"""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from pdcluster_worker.config.worker import TLSConfig
from pdcluster_worker.headless import (
    HeadConnectionError,
    HeadHello,
    HeadReply,
    encode,
    read_frame,
    server_context,
    write_frame,
)
from pdcluster_worker.messages.engine import EngineFailed, Ping, Stop, decode_outputs
from pdcluster_worker.messages.engine import encode as encode_messages
from pdcluster_worker.processes import engine_mailbox as mailbox_module
from pdcluster_worker.processes.engine_mailbox import HeadClient
from tests.ports import free_port

HELLO = HeadHello(1, "c", "r", "mixed", "node-b", "127.0.0.1")


class PlayedHead:
    """A head in a thread of its own, for one engine."""

    def __init__(self, tls: TLSConfig, answer: HeadReply) -> None:
        self.port = 0
        self.heard: list[bytes] = []
        self._tls, self._answer = tls, answer
        self._loop = asyncio.new_event_loop()
        self._writer: asyncio.StreamWriter | None = None
        self._server = self._loop.run_until_complete(self._open())
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _open(self) -> asyncio.Server:
        server = await asyncio.start_server(
            self._meet, "127.0.0.1", 0, ssl=server_context(self._tls)
        )
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        try:
            self.heard.append(await read_frame(reader))
            write_frame(writer, encode(self._answer))
            while True:
                self.heard.append(await read_frame(reader))
        except HeadConnectionError:
            writer.close()

    def say(self, *messages: Ping | Stop) -> None:
        assert self._writer is not None
        self._loop.call_soon_threadsafe(write_frame, self._writer, encode_messages(list(messages)))

    def cut(self) -> None:
        assert self._writer is not None
        self._loop.call_soon_threadsafe(self._writer.close)

    def wait_heard(self, count: int) -> None:
        end = time.monotonic() + 5
        while len(self.heard) < count:
            assert time.monotonic() < end, f"got {len(self.heard)} frames, not {count}"
            time.sleep(0.005)

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            if self._writer is not None:
                self._writer.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 5)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


@pytest.fixture
def head(tls: TLSConfig) -> Iterator[PlayedHead]:
    head = PlayedHead(tls, HeadReply(dtype="bfloat16"))
    yield head
    head.close()


@pytest.fixture
def mailbox(head: PlayedHead, tls: TLSConfig) -> Iterator[HeadClient]:
    mailbox = HeadClient(("127.0.0.1", head.port), tls, HELLO)
    yield mailbox
    mailbox.close()


def test_mailbox_says_hello_and_carries_messages_both_ways(
    head: PlayedHead, mailbox: HeadClient
) -> None:
    assert mailbox.answer == HeadReply(dtype="bfloat16")
    head.say(Ping(), Ping())
    assert mailbox.receive(5.0) == [Ping(), Ping()]
    mailbox.send([EngineFailed("no")])
    head.wait_heard(2)
    assert decode_outputs(head.heard[1]) == [EngineFailed("no")]


def test_mailbox_does_not_wait_where_the_engine_has_work_and_is_woken_where_it_has_none(
    mailbox: HeadClient,
) -> None:
    assert mailbox.receive(0.0) == []
    mailbox.wake()
    assert mailbox.receive(None) == []


def test_mailbox_says_that_the_head_is_gone(head: PlayedHead, mailbox: HeadClient) -> None:
    head.cut()
    with pytest.raises(
        HeadConnectionError,
        match=rf"the head 127\.0\.0\.1:{head.port} is gone: the connection ended",
    ):
        mailbox.receive(5.0)


def test_mailbox_takes_silence_for_the_end_of_the_head(
    head: PlayedHead, tls: TLSConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_module, "SILENCE_SECONDS", 0.05)
    mailbox = HeadClient(("127.0.0.1", head.port), tls, HELLO)
    with pytest.raises(HeadConnectionError, match="it has sent nothing for 0 s"):
        mailbox.receive(5.0)
    mailbox.close()


def test_mailbox_is_refused_with_the_reason_of_the_head(tls: TLSConfig) -> None:
    head = PlayedHead(tls, HeadReply(refused="its role is 'decode', the head's 'mixed'"))
    with pytest.raises(HeadConnectionError, match="refuses this engine: its role is 'decode'"):
        HeadClient(("127.0.0.1", head.port), tls, HELLO)
    head.close()


def test_mailbox_gives_up_a_head_that_does_not_answer(
    tls: TLSConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_module, "_RETRY_SECONDS", 0.01)
    with pytest.raises(
        HeadConnectionError, match=r"cannot be reached for 0 s: .*Connect call failed"
    ):
        HeadClient(("127.0.0.1", free_port()), tls, HELLO, 0.05)
