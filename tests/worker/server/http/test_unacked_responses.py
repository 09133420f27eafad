"""Connections of a port in the kernel's tables: real lines, wrong ones, none; a client that reads
nothing; real sockets.
"""

import asyncio
import socket
import sys

import pytest

from pdcluster_worker.server.http.run import (
    REMEMBER_SECONDS,
    STALLED_SECONDS,
    TABLES,
    UnackedResponses,
    local_end,
    name,
    parse,
    read,
)
from pdcluster_worker.serving import draining

PORT = 8000
LOCAL = ":1F40"
HEAD = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout "
    "inode\n"
)
LISTENS = (
    "   0: 00000000:1F40 00000000:0000 0A 00000000:00000003 00:00000000 00000000  1000        0 "
    "3137922 1 00000000ef04a214 100 0 0 10 0\n"
)
WAITS = (
    "   1: 0A01F40A:1F40 0B01F40A:C001 01 00012C00:00000000 04:000000C8 00000000  1000        0 "
    "3137923 2 00000000ef04a215 20 4 1 10 -1\n"
)
WAITS_6 = (
    "   0: 0000000000000000FFFF00000A01F40A:1F40 0000000000000000FFFF00000B01F40A:C002 01 "
    "0000000A:00000000 01:00000014 00000000"
    "  1000        0 3137924 2 00000000ef04a216 20 4 1 10 -1\n"
)


def line(
    state: str = "01",
    tx_queue: str = "00000005",
    local: str = "0A01F40A:1F40",
    remote: str = "0B01F40A:C001",
) -> str:
    return (
        f"   7: {local} {remote} {state} {tx_queue}:00000009 00:00000000 00000000 1000 0 3137925 1 "
        "00000000ef04a217 20 4 1 10 -1\n"
    )


def test_parse_takes_what_waits_on_the_port_and_nothing_else() -> None:
    other_port = line(local="0A01F40A:1F41", remote="0B01F40A:1F40")
    found = dict(
        parse(
            [
                HEAD,
                LISTENS,
                WAITS,
                WAITS_6,
                other_port,
                line(tx_queue="00000000", remote="0B01F40A:C003"),
            ],
            LOCAL,
        )
    )

    assert list(found.values()) == [76_800, 10]
    assert [name.split()[1].rpartition(":")[2] for name in found] == ["C001", "C002"]


@pytest.mark.parametrize(
    ("state", "num_bytes"),
    [
        ("01", 5),  # ESTABLISHED
        ("02", 0),  # SYN_SENT
        ("03", 0),  # SYN_RECV
        ("04", 4),  # FIN_WAIT1: the end counts as a byte
        ("05", 0),  # FIN_WAIT2
        ("06", 0),  # TIME_WAIT
        ("07", 0),  # CLOSE
        ("08", 5),  # CLOSE_WAIT
        ("09", 4),  # LAST_ACK
        ("0A", 0),  # LISTEN
        ("0B", 4),  # CLOSING
    ],
)
def test_parse_counts_what_a_client_waits_for_in_each_state(state: str, num_bytes: int) -> None:
    assert sum(dict(parse([line(state)], LOCAL)).values()) == num_bytes


@pytest.mark.parametrize("state", ["04", "09", "0B"])
def test_parse_leaves_out_an_end_that_alone_is_not_acknowledged(state: str) -> None:
    assert not dict(parse([line(state, tx_queue="00000001")], LOCAL))


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "\n",
        "x",
        "1: 2 3 01",
        line(tx_queue="zz"),
        line(local="0A01F40A"),
        line(local=":"),
        "\0" * 50,
        "01 " * 30,
    ],
)
def test_parse_passes_over_what_is_no_line(garbage: str) -> None:
    assert dict(parse([garbage, WAITS], LOCAL)) == dict(parse([WAITS], LOCAL))


def test_read_puts_tables_together_and_passes_over_those_that_are_not_there(tmp_path) -> None:
    (tmp_path / "tcp").write_bytes(HEAD.encode() + b"\xff\xfe\n" + WAITS.encode())
    (tmp_path / "tcp6").write_text(HEAD + WAITS_6)
    tables = [tmp_path / "tcp", tmp_path / "absent", tmp_path / "tcp6"]

    assert sorted(read(tables, LOCAL).values()) == [10, 76_800]
    assert read([tmp_path / "absent"], LOCAL) == {}


def test_table_that_cannot_be_read_now_does_not_say_that_all_is_taken(tmp_path) -> None:
    """As when the process has no descriptor left."""
    with pytest.raises(IsADirectoryError):
        read([tmp_path], LOCAL)


@pytest.mark.parametrize(
    ("host", "counts"),
    [
        ("0.0.0.0", True),
        ("::", True),
        ("10.244.1.10", True),
        ("10.244.1.11", False),
        ("fe80::1%eth0", False),
    ],
)
def test_connections_of_another_address_with_the_same_port_are_those_of_another_program(
    host: str, counts: bool
) -> None:
    found = dict(
        parse(
            [line(local=name(("10.244.1.10", PORT), ("10.244.1.12", 1)).split()[0])],
            local_end(host, PORT),
        )
    )
    assert bool(found) is counts


class Table:
    """One table of one line, and a clock that is set by hand."""

    def __init__(self, folder) -> None:
        self.path = folder / "tcp"
        self.now = 0.0
        self.unsent = UnackedResponses("0.0.0.0", PORT, [self.path], lambda: self.now)

    async def count(self, tx_queue: str, now: float) -> int:
        self.path.write_text(HEAD + line(tx_queue=tx_queue))
        self.now = now
        return len(await self.unsent.connections())

    async def count_until(self, tx_queue: str, end: float, pace: float = REMEMBER_SECONDS) -> int:
        """Poll like a drain, the last time at `end`."""
        while self.now + pace < end:
            await self.count(tx_queue, self.now + pace)
        return await self.count(tx_queue, end)


async def test_client_of_which_nothing_moves_counts_no_more_and_is_reported_once(
    tmp_path, caplog
) -> None:
    table = Table(tmp_path)

    assert await table.count("00000400", 1000) == 1
    assert await table.count_until("00000400", 1000 + STALLED_SECONDS - 1) == 1
    assert await table.count_until("00000400", 1000 + STALLED_SECONDS) == 0
    assert await table.count_until("00000400", 1000 + 2 * STALLED_SECONDS) == 0
    assert caplog.messages == [
        "client reads nothing, no longer waiting for it unsent_bytes=1024 seconds=45"
    ]


async def test_slow_client_counts_as_long_as_it_takes_something(tmp_path, caplog) -> None:
    table = Table(tmp_path)
    for turn in range(20):
        await table.count(f"{1000 - turn:08X}", table.now)
        assert await table.count_until(f"{1000 - turn:08X}", table.now + STALLED_SECONDS - 1) == 1
    assert await table.count("00000000", table.now + 1) == 0

    assert not caplog.messages


async def test_client_that_was_given_up_counts_again_when_it_goes_on(tmp_path) -> None:
    table = Table(tmp_path)
    await table.count("00000400", 0)
    assert await table.count_until("00000400", STALLED_SECONDS) == 0

    assert await table.count("00000300", STALLED_SECONDS + 1) == 1


async def test_what_was_there_at_a_look_of_long_ago_is_another_answer(tmp_path, caplog) -> None:
    """A drain that was withdrawn, and the same number of bytes in one of hours later."""
    table = Table(tmp_path)
    await table.count("00000400", 0)
    assert await table.count_until("00000400", STALLED_SECONDS - 1) == 1

    assert await table.count("00000400", STALLED_SECONDS + REMEMBER_SECONDS) == 1
    assert await table.count_until("00000400", 2 * STALLED_SECONDS) == 1
    assert not caplog.messages


def test_clients_are_looked_at_often_enough_to_be_remembered_while_requests_run() -> None:
    assert draining.FOLLOW_SECONDS + draining.UNSENT_CHECK_SECONDS < REMEMBER_SECONDS


def test_name_is_that_of_the_tables() -> None:
    (found,) = dict(parse([WAITS], LOCAL))
    assert found == "0A01F40A:1F40 0B01F40A:C001"
    if sys.byteorder == "little":
        assert name(("10.244.1.10", 8000), ("10.244.1.11", 0xC001)) == found


@pytest.mark.skipif(not TABLES[0].exists(), reason="the kernel has no such tables")
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize(
    ("family", "host"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")],
    ids=["ipv4", "ipv6"],
)
async def test_real_connection_counts_until_its_client_has_read(family, host, closed) -> None:
    loop = asyncio.get_running_loop()
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.socket(family) as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(listener.getsockname()[:2])
        client.setblocking(False)
        accepted, _ = listener.accept()
        with accepted:
            unsent = UnackedResponses(*listener.getsockname()[:2])
            assert not await unsent.connections()
            known = name(accepted.getsockname()[:2], accepted.getpeername()[:2])
            accepted.setblocking(False)
            num_sent = accepted.send(bytes(10_000))
            if closed:
                accepted.close()
            assert await unsent.connections() == {known}
            while num_sent:
                num_sent -= len(await loop.sock_recv(client, 1 << 16))
            async with asyncio.timeout(10):
                while await unsent.connections():
                    await asyncio.sleep(0.01)
