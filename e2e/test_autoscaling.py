"""Each role comes and goes with its own load, within its bounds, and where no node takes a worker
the request is given back.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from math import inf
from pathlib import Path

import pytest

from e2e.client_program import Stories
from e2e.harness import LOOK_SECONDS, NAME, Json, Kubernetes, example, ready
from e2e.streams import cut, streams
from pdcluster_api.plan.autoscale.histogram import LatencyHistogram
from pdcluster_operator.scrape.page import parse_page
from tests.system.waiting import wait_for

SECONDS = 240.0
WINDOW = timedelta(seconds=15)
# Lines that a small load on a small model crosses, and a window that a test can wait for.  All
# prompts of LONG_PROMPTS take 0.15 of two decode workers' KV cache, and LONG_ANSWERS 0.85 of one's
# at their ends; half as much where the CPU computes in bfloat16.
AUTOSCALE: Json = {
    "mode": "On",
    "intervalSeconds": 5,
    "prefill": {"queueUp": 3, "queueDown": 1},
    "decode": {"queueUp": 4, "queueDown": 1, "kvUsageUp": 0.2, "kvUsageDown": 0.04},
    "scaleDown": {"windowSeconds": WINDOW.seconds},
}
# Short prompts, which decode workers prefill themselves, and long answers; long prompts, of which a
# word is the answer.  These ask for remote prefill: `auto` lets no more of them wait than about the
# threshold of the queue.
LONG_ANSWERS = Stories(count=1000, clients=32, max_tokens=300, words=8, seconds=45)
LONG_PROMPTS = Stories(
    count=1000, clients=8, max_tokens=2, words=400, seconds=45, first=5000, prefill=("remote",)
)
# One of three prompts is long: the mean of the first tokens is far from the 80th percentile.  With
# one client that pauses the prefill worker has room, so its demand asks for no other worker.
TAIL = Stories(
    count=1000,
    clients=1,
    max_tokens=2,
    words=8,
    third_words=450,
    pause=0.5,
    seconds=120,
    first=9000,
    prefill=("remote",),
)
FAR: Json = {"far": {"nodeLabels": {"pdcluster.io/e2e": "no-node-has-it"}}}


@pytest.fixture
def scaled(chat: Kubernetes) -> Iterator[Kubernetes]:
    """The example, whose spec the test replaces; at the end it is as it was."""
    yield chat
    chat.replace(example()["spec"])


def spec(decode: list[Json], **autoscale: object) -> Json:
    """The example's with the autoscaler on, at most two prefill workers, and these decode pools."""
    found = {**example()["spec"], "accelerators": FAR, "autoscale": {**AUTOSCALE, **autoscale}}
    found["roles"]["prefill"]["pools"] = [pool("cpu", 1, maximum=2)]
    found["roles"]["decode"]["pools"] = decode
    return found


def pool(gpu: str, minimum: int, *, maximum: int) -> Json:
    return {
        "name": gpu,
        "gpu": gpu,
        "replicas": minimum,
        "minReplicas": minimum,
        "maxReplicas": maximum,
    }


def num_pods(cluster: Kubernetes, role: str, gpu: str = "cpu") -> int:
    return len(cluster.pods(f"pdcluster.io/role={role}", f"pdcluster.io/pool={gpu}"))


def wait_ready(cluster: Kubernetes, number: int, role: str) -> None:
    """Wait for so many ready workers of the role's pool on CPUs, and no other pod."""

    def is_there() -> bool:
        found = cluster.pods(f"pdcluster.io/role={role}", "pdcluster.io/pool=cpu")
        return len(found) == len(ready(found)) == number

    wait_for(
        is_there,
        SECONDS,
        lambda: why(cluster) + cluster.kubectl("get", "pods,pdc"),
        poll_seconds=LOOK_SECONDS,
    )


def decisions(cluster: Kubernetes) -> list[Json]:
    """The recorded ones, the newest first."""
    status = cluster.get(f"pdc/{NAME}").get("status", {})
    return list(status.get("autoscaling", {}).get("lastDecisions", []))


def change(
    cluster: Kubernetes, subject: str, before: int, after: int, rule: str = "pool"
) -> Json | None:
    """The newest decision in which a rule took a pool or role from one number to another; None =
    there is none.
    """
    wanted = {"rule": rule, "subject": subject, "before": before, "after": after}
    return next(
        (
            each
            for each in decisions(cluster)
            if any(wanted.items() <= step.items() for step in each["steps"])
        ),
        None,
    )


def reasons(decision: Json, role: str) -> set[str]:
    """The numbers that were over their line and that the rule `need` names."""
    over = {
        each["name"]
        for each in decision["inputs"]
        if each["subject"] == role and each.get("value", 0.0) > each.get("limit", inf)
    }
    said = " ".join(
        step["why"]
        for step in decision["steps"]
        if (step["rule"], step["subject"]) == ("need", role)
    )
    return {name for name in over if name in said}


def size_of(decision: Json, role: str) -> int:
    return sum(each["replicas"] for each in decision["replicas"] if each["role"] == role)


def why(cluster: Kubernetes) -> str:
    """Last ten decisions, by `pdctl why`."""
    pdctl = Path(sys.executable).with_name("pdctl")
    command = [
        pdctl,
        "why",
        NAME,
        "--last=10",
        "--namespace=default",
        f"--kubeconfig={cluster.kubeconfig}",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def condition(cluster: Kubernetes, kind: str) -> str | None:
    """The message of a condition that is true."""
    found = cluster.get(f"pdc/{NAME}").get("status", {}).get("conditions", [])
    return next(
        (each["message"] for each in found if each["type"] == kind and each["status"] == "True"),
        None,
    )


def test_each_role_grows_on_its_own_load_and_shrinks_after_it(scaled: Kubernetes) -> None:
    scaled.replace(spec([pool("cpu", 1, maximum=2)]))

    load_ends: dict[str, datetime] = {}
    for role, load in (("decode", LONG_ANSWERS), ("prefill", LONG_PROMPTS)):
        # until then at least clients go on asking
        load_ends[role] = datetime.now(UTC) + timedelta(seconds=load.seconds)
        with streams(scaled, load) as running:
            wait_ready(scaled, 2, role)
            answers = running.wait_ended(SECONDS)
        assert (len(answers) >= load.clients, cut(answers, load)) == (True, [])

    decode, prefill = change(scaled, "decode/cpu", 1, 2), change(scaled, "prefill/cpu", 1, 2)
    assert decode is not None
    assert prefill is not None
    assert reasons(decode, "decode") == {"kv_cache_usage_ratio"}
    assert size_of(decode, "prefill") == 1
    assert reasons(prefill, "prefill") & {"prefill_queue_requests", "engine_busy_ratio"}
    assert not reasons(prefill, "decode")
    wait_ready(scaled, 1, "decode")
    wait_ready(scaled, 1, "prefill")
    for role, end in load_ends.items():
        shrunk = change(scaled, f"{role}/cpu", 2, 1)
        assert shrunk is not None
        # Times of decisions are whole seconds.
        assert datetime.fromisoformat(shrunk["at"]) >= end.replace(microsecond=0) + WINDOW, why(
            scaled
        )
    grown = [
        step["subject"]
        for each in decisions(scaled)
        for step in each["steps"]
        if step["rule"] == "pool" and step["before"] < step["after"]
    ]
    assert sorted(grown) == ["decode/cpu", "prefill/cpu"], why(scaled)
    told = [line.split() for line in why(scaled).splitlines()]
    for role, name in (("decode", "kv_cache_usage_ratio"), ("prefill", "prefill_queue_requests")):
        assert [role, "sees", name] in [words[:3] for words in told]
        assert [f"{role}/cpu", "pool", "1", "2"] in [words[:4] for words in told]
        assert [f"{role}/cpu", "pool", "2", "1"] in [words[:4] for words in told]


def first_tokens(cluster: Kubernetes) -> LatencyHistogram:
    """Return those of the only decode worker, since it began."""
    (pod,) = ready(cluster.pods("pdcluster.io/role=decode", "pdcluster.io/pool=cpu"))
    (page,) = cluster.ask("get", f"http://{pod['status']['podIP']}:8000/metrics")
    return parse_page(page["text"].encode()).histograms["ttft"]


def grown_since(cluster: Kubernetes, before: LatencyHistogram) -> tuple[float, float]:
    """Return the mean and the 80th percentile of first tokens since."""
    found = first_tokens(cluster).since(before)
    assert found is not None
    mean, late = found.mean, found.percentile(80)
    assert mean is not None
    assert late is not None
    return mean, late


@pytest.mark.long
def test_tail_over_its_objective_grows_prefill_while_the_mean_holds(scaled: Kubernetes) -> None:
    decode = [pool("cpu", 1, maximum=1)]
    scaled.replace(spec(decode, mode="Off"))
    wait_ready(scaled, 1, "prefill")
    before = first_tokens(scaled)
    with streams(scaled, replace(TAIL, seconds=60, first=8000)) as running:
        assert cut(running.wait_ended(SECONDS), TAIL) == []
    mean, late = grown_since(scaled, before)
    assert late > 1.5 * mean, "the load has no tail"
    seconds = round((mean * late) ** 0.5, 3)
    # no other signal can ask for a worker
    scaled.replace(
        spec(
            decode,
            prefill={"queueUp": 100, "queueDown": 99, "utilizationUp": 1.0},
            objective={"ttft": {"percentile": 80, "seconds": seconds}},
        )
    )

    before = first_tokens(scaled)
    with streams(scaled, TAIL) as running:
        grown = wait_for(
            lambda: change(scaled, "prefill/cpu", 1, 2),
            SECONDS,
            lambda: why(scaled),
            poll_seconds=LOOK_SECONDS,
        )
        mean, _ = grown_since(scaled, before)
        assert cut(running.wait_ended(SECONDS), TAIL) == []

    assert grown is not None
    assert mean < seconds, why(scaled)
    assert reasons(grown, "prefill") == {"time_to_first_token_seconds_p80"}
    told = why(scaled)
    assert "time_to_first_token_seconds_samples" in told
    wait_ready(scaled, 1, "prefill")


def test_type_without_a_node_gives_its_request_back_and_another_takes_it(
    scaled: Kubernetes,
) -> None:
    decode = [pool("cpu", 1, maximum=2), pool("far", 0, maximum=1)]
    scaled.replace(spec(decode, cost={"far": 0.5}, capacitySeconds=5, backoffSeconds=300))

    with streams(scaled, LONG_ANSWERS) as running:
        wait_for(
            partial(num_pods, scaled, "decode", "far"),
            SECONDS,
            lambda: why(scaled),
            poll_seconds=LOOK_SECONDS,
        )
        told = wait_for(
            lambda: condition(scaled, "CapacityShort"),
            SECONDS,
            lambda: why(scaled),
            poll_seconds=LOOK_SECONDS,
        )
        wait_ready(scaled, 2, "decode")
        answers = running.wait_ended(SECONDS)

    assert cut(answers, LONG_ANSWERS) == []
    # by the load of that moment
    assert re.match("far is short of (1 worker|2 workers) that no node takes", told)
    assert num_pods(scaled, "decode", "far") == 0
    for subject, before, after, rule in (
        ("far", 0, 1, "pool"),
        ("far", 1, 0, "capacity"),
        ("cpu", 1, 2, "pool"),
    ):
        assert change(scaled, f"decode/{subject}", before, after, rule) is not None, why(scaled)
    wait_ready(scaled, 1, "decode")
    assert condition(scaled, "CapacityShort") is None


def test_bounds_are_kept_without_any_load(scaled: Kubernetes) -> None:
    scaled.replace(spec([pool("cpu", 1, maximum=1)]))
    wait_for(lambda: decisions(scaled), SECONDS, "the first decision", poll_seconds=LOOK_SECONDS)

    for before, bound in ((1, 2), (2, 1)):
        scaled.replace(spec([pool("cpu", bound, maximum=bound)]))
        wait_ready(scaled, bound, "decode")
        assert change(scaled, "decode/cpu", before, bound, "bounds") is not None, why(scaled)
