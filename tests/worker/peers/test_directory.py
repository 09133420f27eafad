"""Pairs of real gRPC workers over real mutual TLS: peers kept, refused and lost."""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from pdcluster_worker.errors import ConfigError, PeerError
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.messages.peers import Report, TraceEvent, WorkerLoad
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, TransferTarget
from pdcluster_worker.peers.client import LocalWorker
from pdcluster_worker.peers.directory import Directory
from pdcluster_worker.peers.service import start_grpc
from pdcluster_worker.peers.tls import Credentials
from pdcluster_worker.tracing import trace_context

Eventually = Callable[..., Any]


async def pair(worker: Any, eventually: Eventually, **prefill: Any) -> tuple[Any, Any]:
    """A decode worker `d` with its prefill worker `p`, ready."""
    d, p = await worker("d", "decode"), await worker("p", "prefill", **prefill)
    d.sees(p)
    await eventually(d.directory.prefills)
    return d, p


def num_peers(of: Any, role: str, state: str) -> float:
    value = of.metrics.registry.get_sample_value("pdcluster_peers", {"role": role, "state": state})
    return float(value or 0)


async def test_decode_worker_keeps_every_role_and_not_itself(
    worker: Any, eventually: Eventually
) -> None:
    d, d2, m, p = (
        await worker("d", "decode"),
        await worker("d2", "decode"),
        await worker("m", "mixed"),
        await worker("p", "prefill"),
    )

    d.sees(d2, m, p)

    await eventually(lambda: {peer.key for peer in d.directory.decodes()} == {"d2", "m"})
    await eventually(lambda: {peer.key for peer in d.directory.prefills()} == {"p"})
    assert num_peers(d, "decode", "ready") == 1


async def test_prefill_worker_keeps_no_peers(worker: Any) -> None:
    d, p = await worker("d", "decode"), await worker("p", "prefill")

    p.sees(d)

    assert p.directory.decodes() == p.directory.prefills() == []
    assert list(p.metrics.peers.collect()[0].samples) == []


async def test_router_keeps_what_decodes_and_no_worker_keeps_a_router(
    worker: Any, eventually: Eventually
) -> None:
    r, d, m, p = [
        await worker(pod, role)
        for pod, role in (("r", "router"), ("d", "decode"), ("m", "mixed"), ("p", "prefill"))
    ]

    r.sees(d, m, p)
    d.sees(r, m)

    await eventually(lambda: {peer.key for peer in r.directory.decodes()} == {"d", "m"})
    await eventually(lambda: {peer.key for peer in d.directory.decodes()} == {"m"})
    assert r.directory.prefills() == []
    assert [key for key in d.metrics.peers._metrics if key[0] == "router"] == []


async def test_router_takes_the_block_size_of_most_that_decode(
    worker: Any, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    r = await worker("r", "router")
    assert r.directory.block_size() == 0
    sized = KVGeometry(2, 4, 2, 64, "float32")
    large, other = [await worker(pod, "decode", geometry=sized) for pod in ("d", "e")]
    small = await worker("f", "decode")

    r.sees(large, other, small)
    await eventually(lambda: len(r.directory.decodes()) == 3)
    assert (r.directory.block_size(), r.directory.block_size()) == (64, 64)
    assert caplog.text.count("blocks of several sizes") == 1
    r.sees(small)
    assert r.directory.block_size() == 16


async def test_ingresses_are_routers_where_there_are_any_else_what_decodes(
    worker: Any, record: Any
) -> None:
    d, r = await worker("d", "decode"), await worker("r", "router")
    members = {
        "d": record("d"),
        "e": record("e"),
        "m": record("m", role="mixed"),
        "p": record("p", role="prefill"),
    }
    drains = {"x": record("x", state="draining")}
    assert d.directory.num_ingresses() == 1
    d.directory.set_members(members | drains)
    assert d.directory.num_ingresses() == 3
    routers = {"r": record("r", role="router"), "r2": record("r2", role="router")}
    for each in (d, r):
        each.directory.set_members(members | routers)

    assert (d.directory.num_ingresses(), r.directory.num_ingresses()) == (2, 2)
    assert (
        d.directory.num_ingresses(relaying=True),
        r.directory.num_ingresses(relaying=True),
    ) == (3, 2)


async def test_ingresses_go_by_the_roles_of_pods(worker: Any, record: Any) -> None:
    """The Service selects pods, whose roles no command changes."""
    d = await worker("d", "decode")
    prefills = record("e", role="prefill", pod_role="decode")
    decodes = record("p", role="decode", pod_role="prefill")

    d.directory.set_members({"d": record("d"), "e": prefills, "p": decodes})

    assert d.directory.num_ingresses() == 2


async def test_prefill_worker_in_the_pod_of_a_decode_worker_knows_decode_workers_alone(
    worker: Any, record: Any, eventually: Eventually
) -> None:
    e = await worker("e", "prefill", pod_role="decode")
    d, p = await worker("d", "decode"), await worker("p", "prefill")

    e.sees(d, p)

    await eventually(lambda: [peer.key for peer in e.directory.decodes()] == ["d"])
    assert e.directory.known_prefills() == []
    assert e.directory.num_ingresses() == 2


async def test_directory_of_a_former_role_leaves_the_metric_to_the_next_one(
    worker: Any, eventually: Eventually, credentials: Credentials
) -> None:
    d, p = await pair(worker, eventually)
    later = Directory("d", LocalWorker(d.hello, credentials, d.refusals, d.index), d.metrics)

    d.directory.end_count()
    assert num_peers(d, "prefill", "ready") == 0

    later.set_members({"d": d.record, "p": p.record})
    await eventually(later.prefills)
    d.directory.end_count()
    await d.directory.close()
    assert num_peers(d, "prefill", "ready") == 1
    await later.close()


async def test_absence_names_each_worker_and_what_keeps_work_from_it(
    worker: Any, record: Any, eventually: Eventually
) -> None:
    r = await worker("r", "router")
    assert r.directory.absence() == "none is registered"

    r.directory.set_members(
        {
            "a": record("a", engine_id="", state="starting"),
            "b": record("b", state="draining"),
            "c": record("c", role="mixed"),
            "p": record("p", role="prefill"),
        }
    )

    await eventually(lambda: "c is lost" in r.directory.absence())
    assert r.directory.absence() == "a is loading the model, b is draining, c is lost"
    assert {peer.key for peer in r.directory.known_decodes()} == {"b", "c"}
    r.directory.set_members(
        {f"d{number}": record(f"d{number}", state="drained") for number in range(6)}
    )
    assert r.directory.absence().endswith("d3 is drained, and 2 more")


async def test_router_refuses_a_worker_of_another_model(
    worker: Any, eventually: Eventually
) -> None:
    r, d = await worker("r", "router", model="chat"), await worker("d", "decode", model="code")

    r.sees(d)

    await eventually(
        lambda: "refused: model is chat here and code at the peer" in r.directory.absence()
    )


async def test_draining_peer_gets_no_new_work_and_keeps_its_streams(
    worker: Any, spec: Any, target: Any, eventually: Eventually
) -> None:
    d, p = await pair(worker, eventually)
    p.handler.hold = True
    peer = d.directory.prefills()[0]
    peer.claim("q1", 3, 0)
    await eventually(lambda: d.credits == [("p", "q1", True)])
    async with aclosing(peer.prefill(spec(), target)) as replies:
        await anext(replies)

        d.directory.set_members({"p": msgspec.structs.replace(p.record, state="draining")})

        assert d.directory.prefills() == []
        assert d.lost == []
        assert p.handler.closed == []


@pytest.mark.parametrize("state", ["ready", "draining"])
async def test_decode_worker_is_found_by_its_pod_also_while_it_drains(
    worker: Any, eventually: Eventually, state: str
) -> None:
    a, b = await worker("a", role="decode"), await worker("b", role="decode")
    members = {
        each.record.pod: msgspec.structs.replace(each.record, state=state) for each in (a, b)
    }
    a.directory.set_members(members)

    await eventually(lambda: a.directory.decode("b") is not None)
    assert (a.directory.decode("a"), a.directory.decode("c")) == (None, None)


@pytest.mark.parametrize(
    ("facts", "label"),
    [
        ({"weights": "w2"}, "weights"),
        ({"operations": "cpu avx2"}, "operations"),
        (
            {
                "geometry": KVGeometry(
                    num_kv_heads=2, head_dim=4, num_layers=2, block_size=32, dtype="float32"
                )
            },
            "kv_geometry",
        ),
    ],
)
async def test_mismatched_pair_is_refused_and_reported_on_both_sides(
    worker: Any, eventually: Eventually, facts: dict[str, Any], label: str
) -> None:
    d, p, other = (
        await worker("d", "decode"),
        await worker("p", "prefill", **facts),
        await worker("p2", "prefill"),
    )

    d.sees(p, other)
    p.sees(d, other)

    await eventually(
        lambda: "p" in d.directory.refused("prefill") and "d" in p.directory.refused("decode")
    )
    await eventually(lambda: [peer.key for peer in d.directory.prefills()] == ["p2"])
    for one in (d, p):
        assert (
            one.metrics.registry.get_sample_value("pdcluster_peer_refused_total", {"reason": label})
            == 1
        )
    assert num_peers(d, "prefill", "refused") == 1
    assert d.directory.refused("decode") == {}
    assert await d.directory.probe(p.record)  # refused is not dead


async def test_refused_peer_is_tried_again_once_it_has_another_engine(
    worker: Any, eventually: Eventually
) -> None:
    d, p = await worker("d", "decode"), await worker("p", "prefill", weights="w2")
    d.sees(p)
    await eventually(lambda: d.directory.refused("prefill"))
    mended = await worker("p", "prefill", engine_id="e2")

    d.sees(mended)

    await eventually(d.directory.prefills)
    assert d.directory.refused("prefill") == {}


async def test_old_engine_id_is_not_connected_to(
    worker: Any, record: Any, eventually: Eventually
) -> None:
    d, p = await worker("d", "decode"), await worker("p", "prefill")

    d.directory.set_members({"p": msgspec.structs.replace(p.record, engine_id="older")})

    await eventually(lambda: num_peers(d, "prefill", "lost") == 1)
    assert not await d.directory.probe(msgspec.structs.replace(p.record, engine_id="older"))
    assert d.directory.prefills() == []


async def test_peer_outside_the_ca_is_not_served(
    worker: Any, authority: Any, stranger_authority: Any, eventually: Eventually
) -> None:
    p = await worker("p", "prefill")
    # It trusts our CA, so only the check of its own certificate can refuse it.
    stranger = await worker(
        "s", "decode", creds=Credentials(stranger_authority.issue(trusted=authority))
    )

    stranger.sees(p)

    await eventually(lambda: num_peers(stranger, "prefill", "lost") == 1)
    assert not await stranger.directory.probe(p.record)
    assert p.handler.watches == 0


async def test_server_outside_the_ca_is_not_trusted(
    worker: Any, authority: Any, stranger_authority: Any
) -> None:
    d = await worker("d", "decode")
    impostor = await worker(
        "p", "prefill", creds=Credentials(stranger_authority.issue(trusted=authority))
    )

    assert not await d.directory.probe(impostor.record)


async def test_garbage_on_the_port_harms_no_peer(worker: Any, eventually: Eventually) -> None:
    d, p = await pair(worker, eventually)
    host, port = p.record.grpc_address.split(":")
    for garbage in (
        b"\x00" * 4096,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\xff\xff" + b"x" * 100,
        b"",
    ):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        writer.close()

    assert await d.directory.probe(p.record)
    assert d.lost == []


async def test_lost_peer_is_found_again_when_it_is_back(
    worker: Any, eventually: Eventually, credentials: Any
) -> None:
    d, p = await pair(worker, eventually)
    port = int(p.record.grpc_address.split(":")[1])
    assert len(d.directory.prefills()) == 1

    await p.server.stop(None)
    await eventually(lambda: d.lost == ["p"])
    assert d.left == [[]]  # at that call it is out of the choice already
    assert d.directory.prefills() == []
    assert not await d.directory.probe(p.record)

    p.server, _ = await start_grpc(p.service, "127.0.0.1", port, credentials)
    await eventually(d.directory.prefills)
    await p.server.stop(None)


async def test_notes_of_a_request_come_back_by_our_clock(
    worker: Any, spec: Any, eventually: Eventually
) -> None:
    d, d2 = await worker("d", "decode"), await worker("d2", "decode")
    d.sees(d2)
    peer = (await eventually(d.directory.decodes))[0]
    facts = {"policy": "least", "cost": 2.5, "candidates": 3, "is_remote": True}
    d2.handler.notes = (TraceEvent("offload", 0.25, facts), TraceEvent("odd", -5.0, {}))

    before = time.monotonic()
    answers = [generated async for generated in peer.generate(spec(), "auto")]

    assert [len(generated.notes) for generated in answers] == [2, 0]
    offload, odd = answers[0].notes
    assert (offload.name, offload.facts, offload.worker) == ("offload", facts, "d2")
    assert before <= odd.seconds <= time.monotonic()  # never before the call
    assert offload.seconds == pytest.approx(odd.seconds + 0.25)
    assert [type(value) for value in offload.facts.values()] == [str, float, int, bool]


@pytest.mark.parametrize(
    "context", [{}, {"traceparent": f"00-{32 * 'a'}-{16 * 'b'}-01", "tracestate": "a=b"}]
)
async def test_trace_context_goes_with_each_request(
    worker: Any, spec: Any, target: Any, eventually: Eventually, context: dict[str, str]
) -> None:
    d, d2, p = (
        await worker("d", "decode"),
        await worker("d2", "decode"),
        await worker("p", "prefill"),
    )
    d.sees(d2, p)
    decode, prefill = (
        (await eventually(d.directory.decodes))[0],
        (await eventually(d.directory.prefills))[0],
    )
    trace_context.enter(context.get("traceparent", ""), context.get("tracestate", ""))

    async for _ in decode.generate(spec(), "auto"):
        pass
    prefill.claim("q1", 3, 0)
    await eventually(lambda: d.credits)
    async for _ in prefill.prefill(spec(), target):
        pass

    assert d2.handler.contexts == p.handler.contexts == [context]


async def held_call(worker: Any, spec: Any, eventually: Eventually) -> tuple[Any, Any, Any]:
    """Two decode workers, and a call of the first to the second that has its first token and gets
    no other.
    """
    d, d2 = await worker("d", "decode"), await worker("d2", "decode")
    d.sees(d2)
    peer = (await eventually(d.directory.decodes))[0]
    d2.handler.hold = True
    tokens = peer.generate(spec(), "auto")
    await anext(tokens)
    return d, d2, tokens


def says(d: Any, d2: Any, state: str) -> None:
    """Give d this state of d2's record."""
    d2.record = msgspec.structs.replace(d2.record, state=state)
    d.sees(d2)


@pytest.mark.parametrize("said", ["record", "report"])
async def test_calls_to_a_drained_peer_go_on_to_their_end(
    worker: Any, spec: Any, eventually: Eventually, said: str
) -> None:
    """It has answered in full before it left etcd; that etcd's word was read sooner than the answer
    must not matter.
    """
    d, d2 = await worker("d", "decode"), await worker("d2", "decode")
    d.sees(d2)
    peer = (await eventually(d.directory.decodes))[0]
    tokens = peer.generate(spec(), "auto")
    await anext(tokens)
    if said == "record":
        says(d, d2, "drained")
    else:
        d2.handler.reports.append(Report(WorkerLoad(state="drained")))
        d2.handler.report_added.set()
        await eventually(lambda: peer.load.state == "drained")

    d.sees()
    await eventually(lambda: d.lost == ["d2"])

    assert [generated.token.finish_reason async for generated in tokens] == ["length"]
    await eventually(lambda: not d.directory._leaving)


@pytest.mark.parametrize("end", ["worker", "directory"])
async def test_calls_to_a_drained_peer_break_off_as_peer_errors(
    worker: Any, spec: Any, eventually: Eventually, end: str
) -> None:
    d, d2, tokens = await held_call(worker, spec, eventually)
    says(d, d2, "drained")

    d.sees()
    await eventually(lambda: d.lost == ["d2"])
    await (d2.server.stop(None) if end == "worker" else d.directory.close())

    with pytest.raises(PeerError):
        await anext(tokens)


@pytest.mark.parametrize("state", ["ready", "draining"])
async def test_calls_to_a_peer_that_went_without_draining_end_at_once(
    worker: Any, spec: Any, eventually: Eventually, state: str
) -> None:
    """Its process may hang, with a connection that answers every ping."""
    d, d2, tokens = await held_call(worker, spec, eventually)
    says(d, d2, state)

    d.sees()

    async with asyncio.timeout(20):
        with pytest.raises(PeerError):
            await anext(tokens)
    await eventually(lambda: not d.directory._leaving)


async def test_watch_brings_load_and_prefix_cache(worker: Any, eventually: Eventually) -> None:
    d, p = await worker("d", "decode"), await worker("p", "prefill")
    p.handler.reports = [
        Report(WorkerLoad(num_running=1), stored=(b"a", b"b"), snapshot=True),
        Report(WorkerLoad(num_running=2, waiting_tokens=7), stored=(b"c",), removed=(b"b",)),
    ]

    d.sees(p)

    await eventually(
        lambda: d.directory.prefills() and d.directory.prefills()[0].load.num_running == 2
    )
    peer = d.directory.prefills()[0]
    assert peer.load == WorkerLoad(num_running=2, waiting_tokens=7)
    assert [peer.prefix_match([block]) for block in (b"a", b"b", b"c")] == [1, 0, 1]


async def test_peer_that_reports_draining_takes_no_new_work(
    worker: Any, eventually: Eventually
) -> None:
    """A report comes within a second and without etcd, whose record may be old."""
    d, p = await worker("d", "decode"), await worker("p", "prefill")
    p.handler.reports = [
        Report(WorkerLoad(), snapshot=True),
        Report(WorkerLoad(num_running=1, state="draining")),
    ]
    d.sees(p)

    await eventually(lambda: [peer.load.num_running for peer in d.directory._peers.values()] == [1])
    assert d.directory.prefills() == []
    assert [peer.state for peer in d.directory._peers.values()] == ["ready"]


async def test_the_end_of_a_drain_is_a_change(worker: Any, eventually: Eventually) -> None:
    """It may vanish at once after it, and those that read its answers must know."""
    d, p = await worker("d", "decode"), await worker("p", "prefill")
    p.handler.reports = [
        Report(WorkerLoad(state="ready"), snapshot=True),
        Report(WorkerLoad(state="draining")),
        Report(WorkerLoad(state="drained")),
    ]
    d.sees(p)

    await eventually(lambda: d.changes[-1:] == [(False, True)])
    assert d.changes[-2] == (False, False)


async def test_call_on_a_peer_that_was_dropped_is_the_peers_end(
    worker: Any, eventually: Eventually
) -> None:
    d, _ = await pair(worker, eventually)
    (peer,) = d.directory.prefills()
    d.directory.set_members({})
    await eventually(lambda: peer.state == "lost")

    target = TransferTarget(bytes(16), "decode-engine", ["127.0.0.1:1"], 0, [1])
    spec = RequestSpec("r", [1], SamplingParams(max_tokens=1, seed=0))
    for stream in (peer.prefill(spec, target), peer.generate(spec, "auto")):
        with pytest.raises(PeerError):
            [item async for item in stream]


async def test_lost_peer_has_no_prefix_cache_here(worker: Any, eventually: Eventually) -> None:
    d, p = await worker("d", "decode"), await worker("p", "prefill")
    p.handler.reports = [Report(WorkerLoad(), stored=(b"a",), snapshot=True)]
    d.sees(p)
    await eventually(lambda: d.index.match("p", [b"a"]))

    await p.server.stop(None)

    await eventually(lambda: d.index.match("p", [b"a"]) == 0)


async def test_taken_port_is_refused(worker: Any, credentials: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError, match=rf"listen\.grpc: 127\.0\.0\.1:{port} cannot be used"):
            await worker("p", "prefill", port=port)


async def test_lost_peer_leaves_no_task_behind(worker: Any, eventually: Eventually) -> None:
    d, p = await pair(worker, eventually)
    before = {
        task for task in asyncio.all_tasks() if "_consume_request_iterator" in str(task.get_coro())
    }
    assert before  # of the Credits stream

    await p.server.stop(None)

    await eventually(lambda: d.lost == ["p"])
    await eventually(lambda: all(task.done() for task in before))
