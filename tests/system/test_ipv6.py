"""Workers whose addresses are of IPv6: HTTP, gRPC and KV are reached there, and HTTP
over IPv4 too.
"""

import httpx
import pytest

from tests.system.ipv6 import has_ipv6
from tests.system.worker_process import port_of


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
def test_workers_of_ipv6_pods_serve_and_move_blocks(new_cluster, prompts, reference):
    cluster = new_cluster("ipv6")
    for role in ("prefill", "decode"):
        worker = cluster.add_worker(role, f"{role}-0", start=False)
        worker.settings["listen"]["host"] = "0.0.0.0"  # what the operator renders
        worker.start(POD_IP="::1")
    cluster.wait_ready()
    decode, prompt = cluster.workers["decode-0"], prompts(40)
    assert [decode.record[f"{kind}_address"][:6] for kind in ("http", "grpc", "kv")] == [
        "[::1]:"
    ] * 3

    answer = decode.client.complete(prompt, "remote")

    assert answer.prefill == "remote"
    reference.check(prompt, answer.tokens)
    port = port_of(decode.record["http_address"])
    assert (
        httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == httpx.codes.OK
    )
