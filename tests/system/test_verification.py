"""Verifications by real workers: KV that moves, a damaged block, a refused pair, busy workers, and
a slow transport.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.system.cluster import NewCluster
from tests.system.conftest import SLOW_BYTES_PER_SECOND
from tests.system.relay import Relays, relayed
from tests.system.verifying import verified
from tests.system.worker_process import WorkerProcess

OTHER_POOL = "other"


@dataclass
class Relayed:
    """A decode worker behind relays, a prefill worker, and one of other weights."""

    decode: WorkerProcess
    prefill: WorkerProcess
    relays: Relays


@pytest.fixture(scope="module")
def behind_relays(open_cluster: NewCluster, other_model: Path) -> Iterator[Relayed]:
    with open_cluster("verified") as cluster:
        decode = cluster.add_worker("decode", "verified-decode-0", start=False)
        prefill = cluster.add_worker("prefill", "verified-prefill-0")
        other = cluster.add_worker("prefill", "other-prefill-0", model=other_model, start=False)
        other.settings["pool"] = OTHER_POOL
        other.start()
        with relayed(decode) as relays:
            for worker in (decode, prefill, other):
                worker.wait_ready()
            yield Relayed(decode, prefill, relays)
            cluster.wait_settled()


def test_pair_that_moves_kv_is_verified(pair, certificates):
    before, sent = pair.decode.metrics(), pair.prefill.metrics()

    found = verified(pair.decode, certificates)

    num_blocks = found["num_prompt_tokens"] // 16
    assert found == {
        "outcome": "verified",
        "decode": pair.decode.name,
        "prefill": pair.prefill.name,
        "transport": "tcp",
        "num_prompt_tokens": 256,
        "num_tokens": found["num_tokens"],
        "num_bytes": num_blocks * pair.decode.block_bytes,
        "bytes_per_second": found["bytes_per_second"],
        "has_checksum": True,
    }
    assert 1 <= found["num_tokens"] <= 8  # of 8: tokens after a near tie are not compared
    assert found["bytes_per_second"] > 0
    pair.decode.wait_growth(before, "kv_verifications_total", 1, outcome="verified")
    pair.prefill.wait_growth(sent, "kv_transfer_bytes_total", found["num_bytes"], direction="sent")
    # of requests and remote prefills nothing is counted, as no client sent any
    for name, labels in (
        ("remote_prefill_total", {"outcome": "ok"}),
        ("long_prompts_total", {"prefill": "remote"}),
        ("credit_requests_total", {"outcome": "granted"}),
        ("time_to_first_token_seconds_count", {}),
    ):
        assert pair.decode.growth(before, name, **labels) == 0, name
    assert pair.prefill.growth(sent, "remote_prefill_phase_seconds_count", phase="queue") == 0


def test_each_verification_has_a_fresh_prompt(pair, certificates):
    before = pair.prefill.metrics()

    num_tokens = sum(verified(pair.decode, certificates)["num_prompt_tokens"] for _ in range(2))

    pair.prefill.wait_growth(before, "prefill_tokens_total", num_tokens)
    assert pair.prefill.growth(before, "prefix_cache_hit_tokens_total") == 0


def test_busy_pair_is_left_alone_unless_requested(pair, certificates, prompts):
    with pair.decode.client.stream(prompts(20), "local", max_tokens=1800) as stream:
        stream.read_tokens(1)
        before = pair.prefill.metrics()
        postponed = verified(pair.decode, certificates, even_if_busy=False)
        assert (postponed["outcome"], postponed["message"]) == (
            "postponed",
            f"{pair.decode.name} has other requests",
        )
        assert pair.prefill.growth(before, "prefill_tokens_total") == 0
        assert verified(pair.decode, certificates)["outcome"] == "verified"


def test_worker_verifies_for_its_own_pod_and_as_a_decode_worker(pair, certificates):
    for worker, pod in ((pair.decode, "gone-decode-0"), (pair.prefill, None)):
        with pytest.raises(grpc.RpcError) as e:
            verified(worker, certificates, pod=pod)
        assert e.value.code() is grpc.StatusCode.NOT_FOUND


def test_rate_is_that_of_the_transport(slow, certificates):
    found = verified(slow.decode, certificates)

    assert found["outcome"] == "verified"
    assert 0 < found["bytes_per_second"] < 2 * SLOW_BYTES_PER_SECOND


def test_damaged_block_fails_the_verification_and_the_next_one_passes(behind_relays, certificates):
    behind_relays.relays.damage_next = True

    found = verified(behind_relays.decode, certificates)

    assert (found["outcome"], found["fault"], found["prefill"]) == (
        "failed",
        "damaged",
        behind_relays.prefill.name,
    )
    assert verified(behind_relays.decode, certificates)["outcome"] == "verified"


def test_refused_pair_fails_the_verification(behind_relays, certificates):
    found = verified(behind_relays.decode, certificates, OTHER_POOL)

    assert (found["outcome"], found["fault"]) == ("failed", "pair_refused")
    assert "weights" in found["message"]
