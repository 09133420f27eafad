"""The condition Disaggregating and `status.disaggregation`: each outcome, and what keeps the status
still.
"""

from dataclasses import replace
from typing import Any

import pytest

from pdcluster_api.plan.observed.state import WorkerDisaggregation, WorkerRecords
from pdcluster_api.plan.status.disaggregating import FEW_PROMPTS, MAX_PAIRS, digest
from pdcluster_schema import conditions as words
from pdcluster_schema.revision import revision_of
from tests.operator.pdcluster_api.plan.clusters import (
    LATER,
    NOW,
    condition_of,
    identity,
    make_cluster,
    plan_all,
    running,
    workload,
)
from tests.operator.pods import pod_states

CLUSTER = make_cluster()  # one prefill worker p-0, decode workers d-0 and d-1
REVISION = revision_of(CLUSTER.spec)
QUIET = WorkerDisaggregation("tcp")
DTYPE = "KV geometry differs: dtype is float32 here and bfloat16 at the peer; set model.dtype"


def refusing(*pods: str, num_refused: int | None = None, **fields: Any) -> WorkerDisaggregation:
    reasons = tuple((pod, DTYPE) for pod in pods)
    return WorkerDisaggregation(
        "tcp", reasons, len(pods) if num_refused is None else num_refused, **fields
    )


def busy(num_long: int, ratio: float) -> WorkerDisaggregation:
    return WorkerDisaggregation("tcp", long_prompts=num_long, remote_ratio=ratio)


def sending(rate: int) -> WorkerDisaggregation:
    return WorkerDisaggregation("tcp", bytes_per_second=rate)


def observed(
    *,
    is_prefill_ready: bool = True,
    revision: str = REVISION,
    worker_records: WorkerRecords | None = None,
    **said: WorkerDisaggregation,
):
    """All ready, and registered workers that say this; names with _ for -."""
    pods = {}
    for role, names in (("prefill", ("p-0",)), ("decode", ("d-0", "d-1"))):
        of = identity(revision, role)
        is_ready = role == "decode" or is_prefill_ready
        pods[role] = workload(of, len(names), pods=pod_states(of, names, ready=is_ready))
    by_pod = {name.replace("_", "-"): each for name, each in said.items()}
    known = worker_records or WorkerRecords(
        dict.fromkeys(("p-0", "d-0", "d-1"), "ready"), disaggregation=by_pod
    )
    return running(CLUSTER, workloads=[pods["prefill"], pods["decode"]], worker_records=known)


def status_of(seen, before=None):
    return plan_all(CLUSTER, seen if before is None else replace(seen, status=before), NOW).status


def shown(seen, before=None) -> tuple[str, str, str]:
    condition = condition_of(status_of(seen, before), words.DISAGGREGATING)
    return condition["status"], condition["reason"], condition["message"]


def figures(seen, before=None) -> dict[str, Any]:
    return status_of(seen, before).get("disaggregation", {})


def test_a_refused_pair_counts_also_while_other_pairs_work():
    assert shown(observed(d_0=refusing("p-0"), d_1=busy(100, 1.0)))[:2] == ("False", "PairRefused")


def test_the_first_few_local_prefills_of_a_cluster_are_no_alarm():
    assert shown(observed(d_0=busy(FEW_PROMPTS - 1, 0.0)))[:2] == ("Unknown", "NoLongPrompts")
    assert shown(observed(d_0=busy(FEW_PROMPTS, 0.0)))[:2] == ("False", "NotOffloading")


@pytest.mark.parametrize("of", ["nothing", "old-workers"])
def test_workers_that_say_nothing_of_it_leave_it_unknown(of: str):
    worker_records = (
        WorkerRecords()
        if of == "nothing"
        else WorkerRecords(dict.fromkeys(("p-0", "d-0"), "ready"))
    )

    assert shown(observed(worker_records=worker_records))[0] == "Unknown"
    assert figures(observed(worker_records=worker_records)) == {}


@pytest.mark.parametrize(
    "worker_records", [None, WorkerRecords(error="away")], ids=["not-asked", "away"]
)
def test_while_etcd_does_not_answer_it_stays_as_it_was(worker_records: WorkerRecords | None):
    before = status_of(observed(d_0=refusing("p-0")))
    after = status_of(replace(observed(), worker_records=worker_records), before)

    assert condition_of(after, words.DISAGGREGATING) == condition_of(before, words.DISAGGREGATING)
    assert after["disaggregation"] == before["disaggregation"]
    assert not condition_of(
        status_of(replace(observed(), worker_records=worker_records)), words.DISAGGREGATING
    )
    unknown = status_of(observed())
    assert (
        condition_of(
            status_of(replace(observed(), worker_records=worker_records), unknown),
            words.DISAGGREGATING,
        )["status"]
        == "Unknown"
    )


def test_workers_that_end_or_are_of_another_revision_say_nothing():
    other = observed(d_0=refusing("p-0"), revision="0123abcd")
    assert (
        shown(replace(other, workloads=[*other.workloads, *running(CLUSTER).workloads]))[0]
        == "Unknown"
    )

    seen = observed(d_0=refusing("p-0"))
    ending = [
        replace(each, pods=tuple(replace(pod, terminating=True) for pod in each.pods))
        for each in seen.workloads
    ]
    assert shown(replace(seen, workloads=ending))[0] == "Unknown"


def test_a_pair_with_a_prefill_worker_that_is_gone_is_none():
    assert shown(observed(d_0=refusing("p-9"), d_1=QUIET))[0] == "Unknown"


def test_refused_pairs_of_the_status_are_bounded_and_counted():
    seen = observed()
    of = identity(REVISION, "prefill")
    names = [f"p-{number:02}" for number in range(12)]
    prefill = workload(of, 12, pods=pod_states(of, names))
    said = {"d-0": refusing(*names[:8], num_refused=12), "d-1": refusing(names[0])}
    found = figures(
        replace(
            seen,
            workloads=[prefill, seen.workloads[1]],
            worker_records=WorkerRecords(disaggregation=said),
        )
    )

    assert found["numRefusedPairs"] == 13
    assert len(found["refusedPairs"]) == MAX_PAIRS
    assert found["refusedPairs"][0] == {"decode": "d-0", "prefill": "p-00", "reason": DTYPE}


def test_figures_that_are_about_the_same_leave_the_status_as_it_was():
    before = status_of(observed(d_0=busy(100, 0.9), p_0=sending(1_000_000_000)))
    same = observed(d_0=busy(200, 0.93), p_0=sending(1_200_000_000))
    other = observed(d_0=busy(200, 0.8), p_0=sending(1_300_000_000))

    assert status_of(same, before) == before
    assert figures(other, before) == {
        "transport": "tcp",
        "remoteShare": "80%",
        "bytesPerSecond": 1_300_000_000,
    }


def test_none_and_all_are_written_only_where_they_are_exact():
    assert figures(observed(d_0=busy(200, 0.0)))["remoteShare"] == "0%"
    assert figures(observed(d_0=busy(900, 1.0), d_1=busy(5, 0.0)))["remoteShare"] == "95%"
    assert figures(observed(d_0=busy(900, 0.0), d_1=busy(5, 1.0)))["remoteShare"] == "5%"
    assert figures(observed(d_0=busy(9, 1.0)))["remoteShare"] == "100%"


@pytest.mark.parametrize(
    "junk",
    [
        "x",
        {"remoteShare": 7, "bytesPerSecond": "much"},
        {"remoteShare": "²%"},
        {"remoteShare": "1e9%"},
    ],
)
def test_figures_that_another_writer_wrote_are_ignored(junk: Any):
    assert figures(observed(d_0=busy(10, 0.5), p_0=sending(7)), {"disaggregation": junk}) == {
        "transport": "tcp",
        "remoteShare": "50%",
        "bytesPerSecond": 7,
    }


def test_turning_false_is_one_event_and_so_is_its_end():
    calm, refused = observed(d_0=busy(10, 1.0)), observed(d_0=refusing("p-0"))
    was_calm, was_refused = status_of(calm), status_of(refused)

    def news(seen, before):
        found = plan_all(CLUSTER, replace(seen, status=before), LATER).events
        return [(each.reason, each.warning) for each in found]

    assert news(refused, was_calm) == [("PairRefused", True)]
    assert news(refused, was_refused) == []
    assert news(observed(d_0=busy(50, 0.0)), was_refused) == [("NotOffloading", True)]
    assert news(calm, was_refused) == [("Offloading", False)]
    assert news(calm, status_of(observed())) == []
    assert news(observed(d_0=busy(1, 0.0)), was_refused) == []


def test_a_digest_changes_with_what_a_plan_makes_something_of_and_with_nothing_else():
    base = {"d-0": busy(100, 0.9), "p-0": sending(1_000_000_000)}

    assert digest(base) == digest({"d-0": busy(110, 0.91), "p-0": sending(1_100_000_000)})
    assert digest(base) != digest({"d-0": refusing("p-0"), "p-0": sending(1_000_000_000)})
    assert digest(base) != digest({"d-0": busy(100, 0.5), "p-0": sending(1_000_000_000)})
    assert digest(base) != digest({"d-0": busy(100, 0.9), "p-0": sending(10_000_000)})
    assert digest({"d-0": busy(1, 0.0)}) != digest({"d-0": busy(FEW_PROMPTS, 0.0)})
