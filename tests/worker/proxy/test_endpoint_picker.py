"""An endpoint picker by a gateway's messages: what it answers in each way of sending a body."""

import asyncio
from typing import Any

import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.qos import AdmissionSpec
from pdcluster_schema.routing import RelayingSpec
from pdcluster_worker.errors import RequestError
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.proxy import endpoint_picker
from pdcluster_worker.proxy import ext_proc_messages as messages
from pdcluster_worker.proxy.endpoint_picker import EndpointPicker, Exchange
from pdcluster_worker.proxy.picker import UpstreamState

NONE, STREAMED = 0, 1
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}'
TURNS = {"policy": "roundRobin"}
REFUSAL = RequestError("none", status=503, code="no_decode_worker", retry_after_seconds=2)


class Gateway:
    """A picker before workers a and b, and the policy that it reads."""

    def __init__(self) -> None:
        self.policy = PolicyConfig(relaying=RelayingSpec(**TURNS))
        self.metrics = Metrics()
        self.picker = EndpointPicker(lambda: self.policy, lambda: REFUSAL, self.metrics)
        self.workers = {pod: self.state(pod) for pod in "ab"}
        self.picker.workers = lambda: list(self.workers.values())
        self.picker.poll()

    def state(self, pod: str, **fields: Any) -> UpstreamState:
        values = {"takes": True, "num_requests": 0, **fields}
        return UpstreamState(f"{pod} e", pod, address(pod), **values)

    def stand(self, pod: str, **fields: Any) -> None:
        self.workers[pod] = self.state(pod, **fields)
        self.picker.poll()

    def set_policy(self, **sections: Any) -> None:
        self.policy = self.policy.model_copy(update=sections)

    def exchange(self) -> Exchange:
        return Exchange(self.picker)

    def chosen(self, body: bytes, subset: list[str] | None = None) -> list[bytes]:
        """Answers to a request whose body comes at once."""
        exchange = self.exchange()
        exchange.take(head(messages.BODY_BUFFERED, subset=subset))
        return exchange.take(part(body))


def address(pod: str) -> str:
    return f"10.0.0.{ord(pod)}:8000"


def head(mode: int | None, *, ends: bool = False, subset: list[str] | None = None) -> bytes:
    """mode: None = of a gateway that does not say how it sends bodies."""
    request = messages.parse_request(b"")
    request.request_headers.end_of_stream = ends
    request.request_headers.SetInParent()
    if mode is not None:
        request.protocol_config.request_body_mode = mode
        request.protocol_config.SetInParent()
    if subset is not None:
        space = request.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint")
        field = space.value.fields.add(key="x-gateway-destination-endpoint-subset")
        field.value.list_value.SetInParent()
        for each in subset:
            field.value.list_value.values.add(string_value=each)
    return request.SerializeToString()


def part(body: bytes, *, ends: bool = True) -> bytes:
    request = messages.parse_request(b"")
    request.request_body.body = body
    request.request_body.end_of_stream = ends
    return request.SerializeToString()


def trailers() -> bytes:
    request = messages.parse_request(b"")
    request.request_trailers.SetInParent()
    return request.SerializeToString()


def echoed(body: bytes, *, ends: bool = True) -> bytes:
    return messages.echo(body, is_end=ends)


def picked(pod: str, phase: str = "request_headers") -> bytes:
    return messages.chosen(phase, address(pod))


@pytest.fixture
async def gateway() -> Gateway:
    return Gateway()


@pytest.mark.parametrize("mode", [messages.BODY_DUPLEX, None])
async def test_both_ways_the_head_waits_for_the_whole_body(gateway: Gateway, mode: int | None):
    exchange = gateway.exchange()
    assert exchange.take(head(mode)) == []
    assert exchange.take(part(b'{"a":', ends=False)) == []
    assert exchange.take(part(b"1}")) == [picked("b"), echoed(b'{"a":1}')]
    assert exchange.has_ended
    assert gateway.picker.num_held_bytes == 0


async def test_a_long_body_goes_back_in_parts(gateway: Gateway):
    exchange = gateway.exchange()
    exchange.take(head(messages.BODY_DUPLEX))
    body = b"x" * (64 << 10)

    assert exchange.take(part(body + b"y")) == [
        picked("b"),
        echoed(body, ends=False),
        echoed(b"y"),
    ]


async def test_both_ways_a_body_may_end_with_trailers(gateway: Gateway):
    exchange = gateway.exchange()
    exchange.take(head(messages.BODY_DUPLEX))
    exchange.take(part(b"{}", ends=False))
    expected = [picked("b"), echoed(b"{}", ends=False), messages.TRAILERS]
    assert exchange.take(trailers()) == expected
    assert exchange.has_ended


async def test_both_ways_a_body_that_is_too_large_is_not_held(gateway: Gateway):
    gateway.set_policy(admission=AdmissionSpec(max_body_bytes=8))
    exchange = gateway.exchange()
    exchange.take(head(messages.BODY_DUPLEX))
    assert exchange.take(part(b"x" * 8, ends=False)) == [
        picked("b"),
        echoed(b"x" * 8, ends=False),
    ]
    assert not exchange.has_ended
    assert exchange.take(part(b"y")) == [echoed(b"y")]
    assert exchange.has_ended


async def test_bodies_that_wait_together_are_bounded(gateway: Gateway):
    gateway.picker.num_held_bytes = 1 << 40
    exchange = gateway.exchange()
    exchange.take(head(messages.BODY_DUPLEX))
    assert exchange.take(part(b"x", ends=False))[0] == picked("b")


async def test_a_gateway_that_leaves_gives_back_what_is_held(gateway: Gateway):
    exchange = gateway.exchange()
    exchange.take(head(messages.BODY_DUPLEX))
    exchange.take(part(b"x" * 100, ends=False))
    assert gateway.picker.num_held_bytes == 100
    exchange.close()
    assert gateway.picker.num_held_bytes == 0


@pytest.mark.parametrize("mode", [messages.BODY_BUFFERED, messages.BODY_BUFFERED_PARTIAL])
async def test_buffered_the_body_comes_after_the_head_was_answered(gateway: Gateway, mode: int):
    exchange = gateway.exchange()
    assert exchange.take(head(mode)) == [messages.HEADERS]
    assert exchange.take(part(b"{}")) == [picked("b", "request_body")]
    assert exchange.has_ended


@pytest.mark.parametrize("mode", [NONE, STREAMED])
async def test_without_a_body_the_load_decides(gateway: Gateway, mode: int):
    exchange = gateway.exchange()
    assert exchange.take(head(mode)) == [picked("b")]
    assert exchange.has_ended


async def test_a_request_without_a_body_waits_for_none(gateway: Gateway):
    assert gateway.exchange().take(head(messages.BODY_DUPLEX, ends=True)) == [picked("b")]


async def test_prompts_that_begin_alike_go_to_one_worker(gateway: Gateway):
    gateway.set_policy(relaying=RelayingSpec(policy="textPrefix", prefix_bytes=64))
    first = gateway.chosen(BODY % b"A long story about the sea and one small boat")
    again = gateway.chosen(BODY % b"A long story about the sea and one small boat, and how")
    assert first == again


async def test_a_body_that_is_no_json_goes_by_load(gateway: Gateway):
    gateway.set_policy(relaying=RelayingSpec(policy="textPrefix"))
    gateway.stand("a", num_requests=3)
    assert gateway.chosen(b"\x00 no JSON") == [picked("b", "request_body")]


async def test_a_gateway_may_bound_the_choice(gateway: Gateway):
    for _ in range(3):
        assert gateway.chosen(b"{}", [address("a")]) == [picked("a", "request_body")]


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:1"]])
async def test_no_worker_of_those_that_the_gateway_takes(gateway: Gateway, subset: list[str]):
    assert b"no_decode_worker" in gateway.chosen(b"{}", subset)[0]


async def test_a_worker_that_drains_gets_no_new_request(gateway: Gateway):
    gateway.stand("b", takes=False)
    for _ in range(3):
        assert gateway.chosen(b"{}") == [picked("a", "request_body")]


async def test_without_a_worker_the_gateway_answers_503(gateway: Gateway):
    gateway.workers.clear()
    gateway.picker.poll()
    exchange = gateway.exchange()
    exchange.take(head(messages.BODY_DUPLEX))
    (answer,) = exchange.take(part(b"{}"))
    assert exchange.has_ended
    assert b"retry-after" in answer
    assert b'"code":"no_decode_worker"' in answer
    name = "pdcluster_picked_requests_total"
    assert gateway.metrics.registry.get_sample_value(name, {"outcome": "refused"}) == 1


async def test_a_request_counts_until_a_report_has_it(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(endpoint_picker, "CHARGE_SECONDS", 0.0)
    gateway.set_policy(relaying=RelayingSpec())
    first = gateway.chosen(b"{}")
    assert gateway.chosen(b"{}") != first  # counts at once where it was sent
    pods = {member.pod: member for member in gateway.picker.picker.members}
    gateway.stand("a", num_requests=5)
    assert [pods[pod].num_requests for pod in "ab"] == [5, 1]
    await asyncio.sleep(0.01)
    assert [pods[pod].num_requests for pod in "ab"] == [5, 0]


async def test_a_message_that_cannot_be_read_is_refused(gateway: Gateway):
    with pytest.raises(ValueError, match="not a ProcessingRequest"):
        gateway.exchange().take(b"\xff\xff")
    with pytest.raises(ValueError, match="neither"):
        gateway.exchange().take(b"")
