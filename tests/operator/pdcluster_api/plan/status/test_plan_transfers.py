"""The condition KVTransferVerified, `status.transfers`, and which pairs of pools are due."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from pdcluster_api.plan.observed.state import PairVerification, PairVerifications
from pdcluster_api.plan.result import DueVerification
from pdcluster_schema import conditions as words
from pdcluster_schema.placement import PlacementSpec
from pdcluster_schema.revision import at_revision, revision_of
from pdcluster_schema.workload import PoolPair
from tests.operator.pdcluster_api.plan.clusters import (
    LATER,
    NOW,
    Planned,
    condition_of,
    identity,
    make_cluster,
    plan_all,
    pool,
    running,
    workload,
)
from tests.operator.pods import pod_states

CLUSTER = make_cluster()  # prefill and decode pool cpu, one and two workers
REVISION = revision_of(CLUSTER.spec)
PAIR = PoolPair("cpu", "cpu")
PREFILL, DECODE = (identity(REVISION, role).name for role in ("prefill", "decode"))
ANNOTATED = "2026-01-02T03:30:00Z"


def passed(**fields: Any) -> PairVerification:
    known: dict[str, Any] = {
        "revision": REVISION,
        "at": NOW,
        "decode_worker": f"{DECODE}-0",
        "prefill_worker": f"{PREFILL}-0",
        "transport": "tcp",
        "num_tokens": 8,
        "num_bytes": 11_800_000,
        "bytes_per_second": 1_200_000_000,
        "has_checksum": True,
    }
    return PairVerification(**{**known, **fields})


def failed(fault: str = "damaged", **fields: Any) -> PairVerification:
    return PairVerification(REVISION, NOW, fault=fault, message="the checksums differ", **fields)


def observed(
    ended: PairVerification | None = None,
    *,
    is_prefill_ready: bool = True,
    wait: str = "",
    **fields: Any,
):
    pods = []
    for role, names in (("prefill", (0,)), ("decode", (0, 1))):
        of = identity(REVISION, role)
        is_ready = role == "decode" or is_prefill_ready
        states = pod_states(of, names, ready=is_ready)
        pods.append(workload(of, len(names), None if is_ready else 0, pods=states))
    found = PairVerifications({PAIR: ended} if ended else {}, {PAIR: wait} if wait else {})
    return running(CLUSTER, workloads=pods, verifications=found, **fields)


def planned(seen, *, now: str = NOW, floor: float | None = None) -> Planned:
    spec = CLUSTER.spec
    if floor is not None:
        placement = PlacementSpec.model_validate({"minTransferGBps": floor})
        spec = spec.model_copy(update={"placement": placement})
    return plan_all(CLUSTER.model_copy(update={"spec": spec}), seen, now)


def shown(plan: Planned) -> tuple[str, str, str]:
    condition = condition_of(plan.status, words.KV_TRANSFER_VERIFIED)
    return condition["status"], condition["reason"], condition["message"]


def after(seen, plan: Planned):
    """The same, with the status of a plan, and a new operator that has seen nothing yet."""
    return replace(seen, status=plan.status, verifications=PairVerifications())


def test_a_revision_whose_workers_are_ready_is_verified_at_once():
    plan = planned(observed())

    assert plan.verify == (DueVerification(PAIR, REVISION, (f"{DECODE}-0", f"{DECODE}-1")),)
    assert shown(plan)[:2] == ("Unknown", "NotVerified")


def test_workers_of_another_template_are_verified_themselves():
    before = observed(passed())
    status = planned(before).status
    prefill, decode = before.workloads
    of = replace(decode.id, template="0a1b2c3d")
    new = workload(of, 2, pods=pod_states(of, (0, 1)))
    meanwhile = replace(before, status=status, workloads=[prefill, decode, new])
    seen = replace(before, status=status, workloads=[prefill, new])
    cluster = at_revision(CLUSTER, REVISION, {"decode": of.template})

    assert not plan_all(cluster, meanwhile, NOW).verify
    plan = plan_all(cluster, seen, NOW)
    assert plan.verify == (DueVerification(PAIR, REVISION, (f"{of.name}-0", f"{of.name}-1")),)
    assert shown(plan)[:2] == ("Unknown", "NotVerified")
    # and the older outcome is not taken for theirs
    assert "transfers" not in plan.status


def test_every_pair_of_pools_is_verified():
    cluster = make_cluster(prefill=[pool(1), pool(1, "big")], decode=[pool(1), pool(1, "big")])
    revision = revision_of(cluster.spec)
    states = [
        workload(
            identity(revision, role, name),
            1,
            pods=pod_states(identity(revision, role, name), (f"{role}-{name}-0",)),
        )
        for role in ("prefill", "decode")
        for name in ("cpu", "big")
    ]
    plan = plan_all(cluster, running(cluster, workloads=states), NOW)

    assert [(due.pair, due.workers) for due in plan.verify] == [
        (PoolPair(source, sink), (f"decode-{sink}-0",))
        for source in ("big", "cpu")
        for sink in ("big", "cpu")
    ]


def test_a_restart_of_the_operator_verifies_nothing_again_within_the_hour():
    seen = observed(passed())
    again = after(seen, planned(seen))

    plan = planned(again, now="2026-01-02T04:04:04Z")

    assert (plan.verify, plan.status) == ((), again.status)
    assert plan.requeue_after_seconds == 1.0
    assert len(planned(again, now="2026-01-02T04:04:05Z").verify) == 1


@pytest.mark.parametrize(("is_busy", "num_verified"), [(False, 24), (True, 0)])
def test_a_pair_is_verified_once_an_hour_and_never_while_it_is_busy(
    num_verified: int, *, is_busy: bool
):
    """Through a day, of which every minute is looked at."""
    seen, begun, num = observed(), datetime.fromisoformat(NOW), 0
    for minute in range(24 * 60):
        now = f"{begun + timedelta(minutes=minute):%Y-%m-%dT%H:%M:%SZ}"
        plan = planned(seen, now=now)
        seen = after(seen, plan)
        if plan.verify and is_busy:
            assert not plan.verify[0].even_if_busy
            seen = replace(seen, verifications=PairVerifications({}, {PAIR: "d-0 has requests"}))
        elif plan.verify:
            num += 1
            seen = replace(seen, verifications=PairVerifications({PAIR: passed(at=now)}))

    assert num == num_verified


def test_another_revision_is_verified_at_once():
    seen = observed(passed(revision="00000000"))

    assert len(planned(seen).verify) == 1
    assert shown(planned(seen))[0] == "Unknown"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("pair_refused", "PairRefused"),
        ("not_connected", "TransferFailed"),
        ("transfer_failed", "TransferFailed"),
        ("damaged", "BlocksDamaged"),
        ("not_used", "TransferNotUsed"),
        ("tokens_differ", "TokensDiffer"),
        ("of_a_newer_worker", "TransferFailed"),
    ],
)
def test_a_pair_that_does_not_pass_is_false_and_the_object_stays_ready(fault: str, reason: str):
    plan = planned(observed(failed(fault)))

    assert shown(plan)[:2] == ("False", reason)
    assert condition_of(plan.status, words.READY)["status"] == "True"
    assert [event.reason for event in plan.events if event.warning] == [reason]


def test_a_pair_that_does_not_pass_is_verified_again_with_back_off():
    seen = observed(failed())
    first = planned(seen)
    assert first.status["transfers"]["pairs"][0]["numFailures"] == 1
    assert planned(after(seen, first), now="2026-01-02T03:05:04Z").verify == ()
    assert len(planned(after(seen, first), now="2026-01-02T03:05:05Z").verify) == 1

    newer = PairVerifications({PAIR: replace(failed(), at="2026-01-02T03:05:06Z")})
    second = planned(replace(seen, status=first.status, verifications=newer))
    assert second.status["transfers"]["pairs"][0]["numFailures"] == 2
    assert planned(after(seen, second), now="2026-01-02T03:07:05Z").verify == ()
    assert len(planned(after(seen, second), now="2026-01-02T03:07:06Z").verify) == 1


def test_a_rate_under_the_floor_is_false_and_another_floor_needs_no_verification():
    slow, well = planned(observed(passed()), floor=10.0), planned(observed(passed()), floor=1.1)

    assert shown(slow)[:2] == ("False", "TransferSlow")
    assert shown(well)[0] == "True"
    lowered = after(observed(), slow)
    assert shown(planned(lowered))[0] == "True"


def test_a_rate_that_was_not_measured_is_unknown_under_a_floor_alone():
    unmeasured = observed(passed(bytes_per_second=0))

    assert shown(planned(unmeasured, floor=10.0))[:2] == ("Unknown", "RateNotMeasured")
    assert shown(planned(unmeasured))[0] == "True"


def test_a_rate_that_was_not_measured_is_measured_again_soon():
    seen = observed(passed(bytes_per_second=0))
    first = planned(seen, floor=10.0)
    (pair,) = first.status["transfers"]["pairs"]
    assert pair["numFailures"] == 1
    later = after(observed(), first)
    assert planned(later, floor=10.0, now="2026-01-02T03:05:04Z").verify == ()
    assert len(planned(later, floor=10.0, now="2026-01-02T03:05:05Z").verify) == 1
    assert planned(later, now="2026-01-02T03:05:05Z").verify == ()


def test_busy_workers_leave_it_open_and_say_so():
    plan = planned(observed(wait="d-0 has other requests"))

    assert shown(plan)[:2] == ("Unknown", "NotVerified")
    assert shown(planned(after(observed(), plan)))[2] == shown(plan)[2]  # by a new operator too
    seen = observed(passed())
    waiting = PairVerifications({}, {PAIR: "d-0 has other requests"})
    later = replace(seen, status=planned(seen).status, verifications=waiting)
    assert shown(planned(later, now=LATER))[0] == "True"


def test_the_annotation_asks_once_even_if_workers_are_busy():
    seen = observed(passed())
    asked = replace(after(seen, planned(seen)), verify_request=ANNOTATED)

    (due,) = planned(asked).verify
    assert (due.request, due.even_if_busy) == (ANNOTATED, True)

    answer = replace(passed(), at="2026-01-02T03:31:00Z", request=ANNOTATED)
    answered = planned(replace(asked, verifications=PairVerifications({PAIR: answer})))
    assert answered.verify == ()
    assert answered.status["transfers"]["pairs"][0]["request"] == ANNOTATED
    (hourly,) = planned(replace(asked, status=answered.status), now="2026-01-02T04:31:00Z").verify
    assert (hourly.request, hourly.even_if_busy) == (ANNOTATED, False)


def test_a_clock_that_was_set_back_loses_no_verification_and_holds_none_up():
    ahead = replace(passed(), at="2026-01-02T05:30:00Z")
    before = planned(observed(ahead), now=ahead.at)
    asked = replace(after(observed(), before), verify_request=ANNOTATED)

    (due,) = planned(replace(asked, verify_request="")).verify
    assert due.pair == PAIR

    answer = replace(passed(), request=ANNOTATED)
    answered = planned(replace(asked, verifications=PairVerifications({PAIR: answer})))
    assert answered.verify == ()
    assert answered.status["transfers"]["pairs"][0]["at"] == NOW


def test_a_pair_that_is_gone_drops_out():
    seen = observed(failed())
    status = planned(seen).status
    without_decode = [state for state in seen.workloads if state.id.role == "prefill"]

    plan = planned(replace(after(seen, planned(seen)), workloads=without_decode, status=status))

    assert "transfers" not in plan.status
    assert shown(plan)[0] == "Unknown"


@pytest.mark.parametrize(
    "junk",
    [
        "x",
        {"revision": REVISION, "pairs": "x"},
        {"revision": REVISION, "pairs": [7, {"prefill": "cpu", "decode": "cpu"}]},
        {"revision": REVISION, "pairs": [{"prefill": "cpu", "decode": "cpu", "at": "noon"}]},
        {
            "revision": REVISION,
            "pairs": [{"prefill": "cpu", "decode": "cpu", "at": NOW, "numBytes": "much"}],
        },
    ],
)
def test_a_status_that_was_written_by_hand_is_ignored(junk: Any):
    plan = planned(observed(status={"transfers": junk}))

    assert len(plan.verify) == 1
