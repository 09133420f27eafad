"""The example answers chat requests through its Service, with the KV cache moved between its
workers.
"""

from e2e.harness import NAME, RELEASE, Kubernetes
from e2e.streams import URL, metric


def test_chat_is_answered_with_remote_prefill(chat: Kubernetes) -> None:
    (prefill,), (decode,) = (
        chat.pods("pdcluster.io/role=prefill"),
        chat.pods("pdcluster.io/role=decode"),
    )
    sent = metric(chat, prefill, "pdcluster_kv_transfer_bytes_total")
    remote = metric(chat, decode, "pdcluster_remote_prefill_total")

    (answer,) = chat.ask("ask", URL, "remote")

    assert (answer["status"], answer["prefill"]) == (200, "remote"), answer
    assert "Paris" in answer["text"]
    assert metric(chat, decode, "pdcluster_remote_prefill_total") == remote + 1
    assert metric(chat, prefill, "pdcluster_kv_transfer_bytes_total") > sent


def test_test_of_the_release_finds_the_operator_healthy(operator: Kubernetes) -> None:
    assert "Phase:          Succeeded" in operator.helm("test", "--timeout=2m", RELEASE)


def test_local_and_remote_prefill_give_the_same_answer(chat: Kubernetes) -> None:
    (local,), (remote,) = chat.ask("ask", URL, "local"), chat.ask("ask", URL, "remote")

    assert (local["prefill"], remote["prefill"]) == ("local", "remote")
    assert local["text"] == remote["text"]


def test_status_tells_what_kubectl_shows(chat: Kubernetes) -> None:
    status = chat.get(f"pdc/{NAME}")["status"]
    conditions = {condition["type"]: condition["status"] for condition in status["conditions"]}

    wanted = ("Ready", "Serving", "DiscoveryReady", "PrefillReady", "DecodeReady", "IngressReady")
    assert {name: conditions.get(name) for name in wanted} == dict.fromkeys(wanted, "True")
    columns = chat.kubectl("get", f"pdc/{NAME}").splitlines()
    assert columns[0].split() == [
        "NAME",
        "MODEL",
        "PREFILL",
        "DECODE",
        "ROUTER",
        "READY",
        "REASON",
        "AGE",
    ]
    assert columns[1].split()[:5] == [NAME, "smollm2-135m-instruct", "1/1", "1/1", "True"]
