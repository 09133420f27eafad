"""The scraper against real listeners on loopback: good workers, bad ones, bounds, and nothing left
open.
"""

import asyncio
import gzip
import re
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
    serves,
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


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (b"<html>sign in</html>\n", "it lacks pdcluster_num_requests_running"),
        (
            PAGE[: PAGE.index(b"pdcluster_engine_busy_ratio") + 10],
            "it ends in the middle of a line",
        ),
        (b"", "it ends in the middle of a line"),
        (
            changed(PAGE, {"pdcluster_engine_busy_ratio": "NaN"}),
            "pdcluster_engine_busy_ratio is no number: b'NaN'",
        ),
        (
            changed(PAGE, {"pdcluster_prompt_tokens_total": "-5"}),
            "pdcluster_prompt_tokens_total is negative: -5",
        ),
        (gzip.compress(PAGE), "it ends in the middle of a line|it lacks"),
    ],
)
async def test_page_that_is_wrong_is_a_miss(page: bytes, message: str):
    result = await scrape_one(sends(http(page)))

    assert isinstance(result, Miss)
    assert result.reason is Reason.BAD_PAGE
    assert re.search(message, result.message)


async def test_compressed_page_is_not_unpacked():
    """Else a small answer could fill the memory."""
    result = await scrape_one(
        sends(http(gzip.compress(PAGE), headers="Content-Encoding: gzip\r\n"))
    )

    assert isinstance(result, Miss)
    assert result.reason is Reason.BAD_PAGE


@pytest.mark.parametrize(
    "status", ["500 Internal Server Error", "404 Not Found", "204 No Content", "302 Found"]
)
async def test_other_status_is_a_miss(status: str):
    result = await scrape_one(sends(http(b"", status=status, headers="Location: /elsewhere\r\n")))

    assert result == Miss(Reason.STATUS, f"it answered with status {status[:3]} instead of 200")


async def test_redirect_is_not_followed():
    async with WorkerServer(sends(http(PAGE))) as other:
        away = http(
            b"",
            status="307 Temporary Redirect",
            headers=f"Location: http://127.0.0.1:{other.port}/metrics\r\n",
        )
        assert isinstance(await scrape_one(sends(away)), Miss)
    assert other.num_connections == 0


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        b"\x00\xff\xfe" * 100,
        b"HTTP/1.1 20",
        b"HTTP/1.1 999999 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + PAGE,
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n" + PAGE,
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n" + PAGE,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" + PAGE,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
    ],
)
async def test_answer_that_is_no_http_is_a_miss(answer: bytes):
    result = await scrape_one(sends(answer, then_closes=True))

    assert isinstance(result, Miss)
    assert result.reason is Reason.BROKEN
    assert len(result.message) < 300
    assert result.message.isprintable()


@pytest.mark.parametrize(
    "sent",
    [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + PAGE[:500]],
)
async def test_worker_that_hangs_is_a_miss(sent: bytes):
    assert await scrape_one(hangs_after(sent), SOON) == Miss(
        Reason.TIMEOUT, "no whole answer within 0.2 s"
    )


async def test_worker_that_drips_is_a_miss():
    result = await scrape_one(sends_endlessly(b"HTTP/1.1 200 OK\r\nX: y\r\n", b""), SOON)

    assert isinstance(result, Miss)
    assert result.reason is Reason.TIMEOUT


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


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n"],
)
async def test_huge_page_is_not_read_to_its_end(head: bytes):
    result = await scrape_one(sends_endlessly(head, b"x" * 65536))

    assert result == Miss(Reason.TOO_LARGE, "its page has more than 262144 bytes")


async def test_page_at_the_limit_is_read():
    limit = 64 * 1024
    page = PAGE + b"\n" * (limit - len(PAGE))

    assert isinstance(
        await scrape_one(sends(http(page)), ScrapeLimits(page_bytes=limit)), MetricsPage
    )
    assert isinstance(
        await scrape_one(sends(http(page + b"\n")), ScrapeLimits(page_bytes=limit)), Miss
    )


async def test_error_page_without_end_is_not_waited_for():
    result = await scrape_one(sends_endlessly(b"HTTP/1.1 503 Busy\r\n\r\n", b"x" * 65536))

    assert isinstance(result, Miss)
    assert result.reason is Reason.STATUS


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


async def test_connections_are_kept():
    async with WorkerServer(sends(http(PAGE))) as server, Scraper() as scraper:
        for _ in range(3):
            [answer] = await scraper.scrape([server.target()])
            assert isinstance(answer.result, MetricsPage)
        assert server.num_connections == 1


async def test_kept_connection_that_the_worker_closed_is_made_again():
    async with WorkerServer(sends(http(PAGE), then_closes=True)) as server, Scraper() as scraper:
        for _ in range(3):
            [answer] = await scraper.scrape([server.target()])
            assert isinstance(answer.result, MetricsPage)
        assert server.num_connections == 3


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


async def test_scraper_makes_a_new_page_for_each_request():
    worker = WorkerPages()
    async with WorkerServer(serves(lambda: http(worker.text()))) as server, Scraper() as scraper:
        [first] = await scraper.scrape([server.target()])
        worker.serve(requests=2)
        [second] = await scraper.scrape([server.target()])

    assert isinstance(first.result, MetricsPage)
    assert isinstance(second.result, MetricsPage)
    assert second.result.prompt_tokens_total - first.result.prompt_tokens_total == 200
    assert second.at > first.at


async def test_nothing_to_scrape_is_no_answer():
    async with Scraper() as scraper:
        assert await scraper.scrape([]) == []


def num_sockets() -> int:
    return len(psutil.Process().net_connections("tcp"))
