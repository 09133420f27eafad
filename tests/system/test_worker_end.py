"""T11 and sudden ends: SIGTERM drains, a dead engine ends its worker at once, and nothing is left
behind.
"""

import contextlib
import signal

import httpx

from tests.system.client import body


def test_draining_worker_takes_no_new_requests(slow, prompts):  # T11
    with slow.decode.client.stream(prompts(20), "local", max_tokens=1500) as stream:
        stream.read_tokens(1)
        slow.decode.terminate()
        slow.decode.wait_for(
            lambda: (
                slow.decode.client.http.get("/ready").status_code == httpx.codes.SERVICE_UNAVAILABLE
            ),
            "not ready",
        )
        reply = slow.decode.client.post(body(prompts(20)))
        assert reply.status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert "draining" in reply.json()["error"]["message"]
        assert "retry-after" in reply.headers
        assert reply.headers["connection"] == "close"  # the next request goes to another worker
    assert slow.decode.wait_end() == 0  # the client left, so nothing holds it


# T11
def test_sigterm_of_a_prefill_worker_finishes_its_transfer(slow, prompts, reference):
    prompt = prompts(500)
    before = slow.decode.metrics()
    with slow.decode.client.stream(prompt, "remote") as stream:
        stream.read_tokens(1)
        slow.prefill.terminate()
        tokens = stream.read_all()

    reference.check(prompt, tokens)
    assert slow.prefill.wait_end() == 0
    slow.decode.wait_growth(before, "remote_prefill_total", 1, outcome="ok")
    assert slow.cluster.record(slow.prefill.name) is None
    assert slow.decode.client.complete(prompts(300), "auto", max_tokens=1).prefill == "local"


# T11
def test_sigterm_lets_an_open_stream_finish_and_another_one_changes_nothing(
    pair, prompts, reference
):
    """As a container runtime sends it that was restarted in the middle of a drain."""
    prompt = prompts(60)
    with pair.decode.client.stream(prompt, "remote", max_tokens=1000) as stream:
        stream.read_tokens(2)
        for _ in range(2):
            pair.decode.terminate()
            pair.decode.wait_for(
                lambda: (
                    pair.decode.client.http.get("/ready").status_code
                    == httpx.codes.SERVICE_UNAVAILABLE
                ),
                "it drains",
            )
        tokens = stream.read_all()

    assert (stream.done, len(tokens)) == (True, 1000)
    reference.check(prompt, tokens[:200])
    assert pair.decode.wait_end() == 0
    assert pair.cluster.record(pair.decode.name) is None


def test_interrupt_in_a_drain_does_not_wait(slow, prompts):
    with slow.decode.client.stream(prompts(20), "local", max_tokens=2000) as stream:
        stream.read_tokens(1)
        slow.decode.terminate()
        slow.decode.wait_for(
            lambda: (
                slow.decode.client.http.get("/ready").status_code == httpx.codes.SERVICE_UNAVAILABLE
            ),
            "it drains",
        )
        slow.decode.process.send_signal(signal.SIGINT)
        assert slow.decode.wait_end() == 0
        with contextlib.suppress(httpx.TransportError):
            stream.read_all()
        assert not stream.done
    assert slow.cluster.record(slow.decode.name) is None


def test_dead_engine_ends_its_worker_at_once(pair, prompts):
    with pair.decode.client.stream(prompts(100), "remote", max_tokens=1500) as stream:
        stream.read_tokens(2)
        pair.decode.kill_engine()
        with contextlib.suppress(httpx.RemoteProtocolError):
            stream.read_all()
    assert not stream.done

    assert pair.decode.wait_end() == 1
    assert pair.cluster.record(pair.decode.name) is None  # revoked, not left to its lease


def test_dead_prefill_engine_costs_no_request(pair, prompts, reference):
    pair.prefill.kill_engine()
    assert pair.prefill.wait_end() == 1

    prompt = prompts(300)
    answer = pair.decode.client.complete(prompt, "auto")
    reference.check(prompt, answer.tokens)
    assert pair.cluster.record(pair.prefill.name) is None


def test_interrupt_drains_like_sigterm(pair):
    pair.prefill.process.send_signal(signal.SIGINT)

    assert pair.prefill.wait_end() == 0
    assert pair.cluster.record(pair.prefill.name) is None
