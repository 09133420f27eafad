"""The scraper against real listeners on loopback: good workers, bad ones, bounds, and nothing left
open.
"""

import asyncio
import gzip
import socket
from contextlib import AsyncExitStack

import psutil
import pytest

from pdcluster_operator.scrape.page import MetricsPage, Miss, Reason, ScrapeTarget
from pdcluster_operator.scrape.scraper import ScrapeLimits, Scraper
from tests.operator.pdcluster_operator.scrape.worker_servers import (
    CHAT,
    Behaviour,
    WorkerServer,
    hangs_after,
    http,
    sends,
    sends_endlessly,
)
from tests.worker_pages import WorkerPages, changed

PAGE = WorkerPages().text()
SOON = ScrapeLimits(connect_seconds=0.2, total_seconds=0.2)
# so that only what the test waits for ends a scrape
PATIENT = ScrapeLimits(connect_seconds=60.0, total_seconds=60.0)


async def scrape_one(behaviour: Behaviour, limits: ScrapeLimits = PATIENT) -> MetricsPage | Miss:
    async with WorkerServer(behaviour) as server, Scraper(limits) as scraper:
        [answer] = await scraper.scrape([server.target()])
        return answer.result


async def test_good_worker_gives_its_page():
    async with WorkerServer(sends(http(PAGE))) as server, Scraper() as scraper:
        [answer] = await scraper.scrape([server.target()])

    assert isinstance(answer.result, MetricsPage)
    assert answer.target == server.target()
    assert answer.seconds >= 0
    assert server.requests[0].startswith("GET /metrics HTTP/1.1\r\n")
    assert "accept-encoding: identity\r\n" in server.requests[0].lower()


async def test_page_may_come_in_pieces_without_a_length():
    half = len(PAGE) // 2
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(part), part) for part in (PAGE[:half], PAGE[half:], b"")
    )

    assert isinstance(
        await scrape_one(sends(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)),
        MetricsPage,
    )


OK = b"HTTP/1.1 200 OK\r\n"
ENDLESS = b"x" * 65536
MISSES = {
    Reason.BAD_PAGE: {
        "sign-in": sends(http(b"<html>sign in</html>\n")),
        "half a page": sends(http(PAGE[: PAGE.index(b"pdcluster_engine_busy_ratio") + 10])),
        "no number": sends(http(changed(PAGE, {"pdcluster_engine_busy_ratio": "NaN"}))),
        # else a small answer could fill the memory
        "packed": sends(http(gzip.compress(PAGE), headers="Content-Encoding: gzip\r\n")),
    },
    Reason.STATUS: {
        "500": sends(http(b"", status="500 Internal Server Error")),
        "204": sends(http(b"", status="204 No Content")),
        "endless": sends_endlessly(b"HTTP/1.1 503 Busy\r\n\r\n", ENDLESS),
    },
    Reason.BROKEN: {
        repr(answer[:40]): sends(answer, then_closes=True)
        for answer in (
            b"",
            b"\x00\xff\xfe" * 100,
            b"HTTP/1.1 20",
            b"HTTP/1.1 999999 OK\r\n\r\n",
            OK + b"Content-Length: 100000\r\n\r\n" + PAGE,
            OK + b"Content-Length: -1\r\n\r\n" + PAGE,
            OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + PAGE,
            OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello",
            OK + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
            OK + b"no colon\r\n\r\n",
        )
    },
    Reason.TIMEOUT: {
        "silent": hangs_after(),
        "half": hangs_after(OK + b"Content-Length: 999\r\n\r\n" + PAGE[:500]),
        "dripping": sends_endlessly(OK + b"X: y\r\n", b""),
    },
    Reason.TOO_LARGE: {
        "endless": sends_endlessly(OK + b"\r\n", ENDLESS),
        "long": sends_endlessly(OK + b"Content-Length: 1000000000000\r\n\r\n", ENDLESS),
    },
}


@pytest.mark.parametrize(
    ("reason", "behaviour"),
    [(reason, each) for reason, cases in MISSES.items() for each in cases.values()],
    ids=[f"{reason} {name}" for reason, cases in MISSES.items() for name in cases],
)
async def test_bad_answer_is_a_miss_with_its_reason(reason: Reason, behaviour: Behaviour):
    result = await scrape_one(behaviour, SOON if reason is Reason.TIMEOUT else PATIENT)
    assert isinstance(result, Miss)
    assert result.reason is reason
    assert len(result.message) < 300
    assert result.message.isprintable()


@pytest.mark.parametrize("closes", [False, True])
async def test_connections_are_kept_and_made_again_where_the_worker_closed_them(closes: bool):
    async with WorkerServer(sends(http(PAGE), then_closes=closes)) as server, Scraper() as scraper:
        for _ in range(3):
            [answer] = await scraper.scrape([server.target()])
            assert isinstance(answer.result, MetricsPage)
        assert server.num_connections == (3 if closes else 1)


async def test_redirect_is_not_followed():
    async with WorkerServer(sends(http(PAGE))) as other:
        away = http(
            b"",
            status="307 Temporary Redirect",
            headers=f"Location: http://127.0.0.1:{other.port}/metrics\r\n",
        )
        assert isinstance(await scrape_one(sends(away)), Miss)
    assert other.num_connections == 0


async def test_refused_connection_is_a_miss():
    with socket.socket() as taken:  # bound and not listening: no other process gets the port
        taken.bind(("127.0.0.1", 0))
        target = ScrapeTarget(CHAT, "prefill", "cpu", "p-0", f"127.0.0.1:{taken.getsockname()[1]}")
        async with Scraper() as scraper:
            [answer] = await scraper.scrape([target])

    assert isinstance(answer.result, Miss)
    assert answer.result.reason is Reason.CONNECT
    assert target.address in answer.result.message


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1",
        "127.0.0.1:",
        ":8000",
        "127.0.0.1:99999",
        "::1:8000",
        "u@h:1",
        "h:1/x?",
        "h:1#",
    ],
)
async def test_address_that_is_none_is_a_miss(address: str):
    async with Scraper() as scraper:
        [answer] = await scraper.scrape([ScrapeTarget(CHAT, "prefill", "cpu", "p-0", address)])

    assert isinstance(answer.result, Miss)
    assert answer.result.reason is Reason.ADDRESS


async def test_ipv6_address_is_scraped():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(http(PAGE))
        await reader.read()
        writer.close()

    try:
        server = await asyncio.start_server(answer, "::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    async with server, Scraper() as scraper:
        address = f"[::1]:{server.sockets[0].getsockname()[1]}"
        [got] = await scraper.scrape([ScrapeTarget(CHAT, "prefill", "cpu", "p-0", address)])
    assert isinstance(got.result, MetricsPage)


async def test_page_at_the_limit_is_read():
    limit = 128 * 1024
    page = PAGE + b"\n" * (limit - len(PAGE))

    assert isinstance(
        await scrape_one(sends(http(page)), ScrapeLimits(page_bytes=limit)), MetricsPage
    )
    assert isinstance(
        await scrape_one(sends(http(page + b"\n")), ScrapeLimits(page_bytes=limit)), Miss
    )


async def test_bad_workers_cost_the_good_ones_nothing():
    behaviours = [
        sends(http(PAGE)),
        hangs_after(),
        sends(http(PAGE)),
        sends(b"garbage", then_closes=True),
        sends(http(PAGE)),
    ]
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(WorkerServer(behaviour)) for behaviour in behaviours
        ]
        scraper = await stack.enter_async_context(
            Scraper(ScrapeLimits(connect_seconds=1.0, total_seconds=1.0))
        )
        answers = await scraper.scrape(
            [server.target(f"p-{n}") for n, server in enumerate(servers)]
        )

    assert [answer.target.pod for answer in answers] == ["p-0", "p-1", "p-2", "p-3", "p-4"]
    assert [isinstance(answer.result, MetricsPage) for answer in answers] == [
        True,
        False,
        True,
        False,
        True,
    ]


async def test_no_more_at_once_than_the_limit_over_all_calls(wait_until):
    gate = asyncio.Event()
    now: list[int] = []
    peak: list[int] = []

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        now.append(1)
        peak.append(len(now))
        await gate.wait()
        now.pop()
        writer.write(http(PAGE))

    limits = ScrapeLimits(concurrency=4, connect_seconds=60.0, total_seconds=60.0)
    async with WorkerServer(waits) as server, Scraper(limits) as scraper:
        calls = [
            asyncio.create_task(scraper.scrape([server.target(f"p-{n}") for n in range(5)]))
            for _ in range(2)
        ]
        await wait_until(lambda: len(now) == 4, "as many as may be are scraped at once")
        gate.set()
        answers = [answer for call in calls for answer in await call]

    assert len(answers) == 10
    assert all(isinstance(answer.result, MetricsPage) for answer in answers)
    assert max(peak) == 4


async def test_slow_workers_of_one_cluster_leave_turns_to_the_others(wait_until):
    limits = ScrapeLimits(concurrency=3, of_one_cluster=2, connect_seconds=60.0, total_seconds=60.0)
    async with (
        WorkerServer(hangs_after()) as slow,
        WorkerServer(sends(http(PAGE))) as good,
        Scraper(limits) as scraper,
    ):
        call = asyncio.create_task(scraper.scrape([slow.target(f"p-{n}") for n in range(5)]))
        await wait_until(
            lambda: slow.num_open == 2, "as many of the slow cluster as may be are scraped at once"
        )
        answers = await scraper.scrape([good.target(f"p-{n}") for n in range(5)])
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    assert all(isinstance(answer.result, MetricsPage) for answer in answers)


async def test_wait_for_a_turn_does_not_count_as_time_of_the_scrape():
    limits = ScrapeLimits(concurrency=1, connect_seconds=0.5, total_seconds=0.5)
    async with (
        WorkerServer(hangs_after()) as slow,
        WorkerServer(sends(http(PAGE))) as good,
        Scraper(limits) as scraper,
    ):
        answers = await scraper.scrape([slow.target("p-0"), slow.target("p-1"), good.target("p-2")])

    assert [isinstance(answer.result, MetricsPage) for answer in answers] == [False, False, True]


async def test_cancelled_round_leaves_nothing_open(wait_until):
    before = num_sockets()
    limits = ScrapeLimits(concurrency=2, connect_seconds=60.0, total_seconds=60.0)
    async with (
        WorkerServer(hangs_after(b"HTTP/1.1 200 OK\r\n\r\n")) as server,
        Scraper(limits) as scraper,
    ):
        call = asyncio.create_task(scraper.scrape([server.target(f"p-{n}") for n in range(5)]))
        await wait_until(lambda: server.num_open == 2, "two are being scraped and three wait")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await wait_until(lambda: server.num_open == 0, "both connections are closed")

        server.behaviour = sends(http(PAGE))
        answers = await scraper.scrape([server.target(f"p-{n}") for n in range(5)])
        assert all(isinstance(answer.result, MetricsPage) for answer in answers)
        assert server.num_open > 0
    await wait_until(
        lambda: num_sockets() <= before, "leaving the scraper closes kept connections too"
    )


def num_sockets() -> int:
    return len(psutil.Process().net_connections("tcp"))
