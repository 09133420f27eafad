"""What the kernel's tables say of a port: real lines, wrong ones, none; a client that takes nothing; real sockets."""

import asyncio
import socket

import pytest

from pdcluster_worker.server.unsent import STALLED_SECONDS, TABLES, Unsent, parse, read

PORT = 8000  # 1F40
HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LISTENS = (
    "   0: 00000000:1F40 00000000:0000 0A 00000000:00000003 00:00000000 00000000  1000        0 3137922 1 00000000ef04a214 100 0 0 10 0\n"
)
WAITS = (
    "   1: 0A01F40A:1F40 0B01F40A:C001 01 00012C00:00000000 04:000000C8 00000000  1000        0 3137923 2 00000000ef04a215 20 4 1 10 -1\n"
)
WAITS_6 = (
    "   0: 0000000000000000FFFF00000A01F40A:1F40 0000000000000000FFFF00000B01F40A:C002 01 0000000A:00000000 01:00000014 00000000"
    "  1000        0 3137924 2 00000000ef04a216 20 4 1 10 -1\n"
)


def line(state: str = "01", tx_queue: str = "00000005", local: str = "0A01F40A:1F40", remote: str = "0B01F40A:C001") -> str:
    return f"   7: {local} {remote} {state} {tx_queue}:00000009 00:00000000 00000000 1000 0 3137925 1 00000000ef04a217 20 4 1 10 -1\n"


def test_parse_takes_what_waits_on_the_port_and_nothing_else() -> None:
    other_port = line(local="0A01F40A:1F41", remote="0B01F40A:1F40")
    found = dict(parse([HEAD, LISTENS, WAITS, WAITS_6, other_port, line(tx_queue="00000000", remote="0B01F40A:C003")], PORT))

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
    assert sum(dict(parse([line(state)], PORT)).values()) == num_bytes


@pytest.mark.parametrize("state", ["04", "09", "0B"])
def test_parse_leaves_out_an_end_that_alone_is_not_acknowledged(state: str) -> None:
    assert not dict(parse([line(state, tx_queue="00000001")], PORT))


@pytest.mark.parametrize(
    "garbage", ["", "\n", "x", "1: 2 3 01", line(tx_queue="zz"), line(local="0A01F40A"), line(local=":"), "\0" * 50, "01 " * 30]
)
def test_parse_passes_over_what_is_no_line(garbage: str) -> None:
    assert dict(parse([garbage, WAITS], PORT)) == dict(parse([WAITS], PORT))


def test_read_puts_tables_together_and_passes_over_those_that_are_not_there(tmp_path) -> None:
    (tmp_path / "tcp").write_bytes(HEAD.encode() + b"\xff\xfe\n" + WAITS.encode())
    (tmp_path / "tcp6").write_text(HEAD + WAITS_6)
    tables = [tmp_path / "tcp", tmp_path / "absent", tmp_path, tmp_path / "tcp6"]

    assert sorted(read(tables, PORT).values()) == [10, 76_800]
    assert read([tmp_path / "absent"], PORT) == {}


class Table:
    """One table of one line, and a clock that is set by hand."""

    def __init__(self, folder) -> None:
        self.path = folder / "tcp"
        self.now = 0.0
        self.unsent = Unsent(PORT, [self.path], lambda: self.now)

    async def count(self, tx_queue: str, now: float) -> int:
        self.path.write_text(HEAD + line(tx_queue=tx_queue))
        self.now = now
        return await self.unsent.count()


async def test_client_of_which_nothing_moves_counts_no_more_and_is_told_once(tmp_path, caplog) -> None:
    table = Table(tmp_path)

    assert await table.count("00000400", 1000) == 1
    assert await table.count("00000400", 1000 + STALLED_SECONDS - 1) == 1
    assert await table.count("00000400", 1000 + STALLED_SECONDS) == 0
    assert await table.count("00000400", 1000 + 2 * STALLED_SECONDS) == 0
    assert caplog.messages == ["client takes nothing of its answer, waited for no more unsent_bytes=1024 seconds=300"]


async def test_slow_client_counts_as_long_as_it_takes_something(tmp_path, caplog) -> None:
    table = Table(tmp_path)
    for turn in range(20):
        assert await table.count(f"{1000 - turn:08X}", turn * (STALLED_SECONDS - 1)) == 1
    assert await table.count("00000000", 20 * STALLED_SECONDS) == 0

    assert not caplog.messages


async def test_client_that_was_given_up_counts_again_when_it_goes_on(tmp_path) -> None:
    table = Table(tmp_path)
    await table.count("00000400", 0)
    assert await table.count("00000400", STALLED_SECONDS) == 0

    assert await table.count("00000300", STALLED_SECONDS + 1) == 1


@pytest.mark.skipif(not TABLES[0].exists(), reason="the kernel has no such tables")
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")], ids=["ipv4", "ipv6"])
async def test_real_connection_counts_until_its_client_has_read(family, host, closed) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server((host, 0), family=family) as listener, socket.socket(family) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(listener.getsockname()[:2])
        client.setblocking(False)
        accepted, _ = listener.accept()
        with accepted:
            unsent = Unsent(listener.getsockname()[1])
            assert await unsent.count() == 0
            accepted.setblocking(False)
            num_sent = accepted.send(bytes(10_000))
            if closed:
                accepted.close()
            assert await unsent.count() == 1
            while num_sent:
                num_sent -= len(await loop.sock_recv(client, 1 << 16))
            async with asyncio.timeout(10):
                while await unsent.count():
                    await asyncio.sleep(0.01)
