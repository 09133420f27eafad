"""Each step of a roll out, as a table: strategy, what is there -> which revision serves, what
stays, what is waited for.
"""

from dataclasses import replace

import pytest

from pdcluster_api.plan.observed.pools import DeclaredRevision
from pdcluster_api.plan.observed.state import Observed
from pdcluster_api.plan.rollout import OldPods, RolloutStep, current_revision, next_step
from tests.operator.pdcluster_api.plan.clusters import ETCD_READY, identity, workload
from tests.operator.pods import pod_states

A, B, C = identity("aaaa"), identity("bbbb"), identity("cccc")


def seen(*workloads, service=None, status=None, records=()):
    states = [each if not hasattr(each, "revision") else workload(each, 2) for each in workloads]
    status = {} if status is None else {"servingRevision": status}
    return Observed(
        1, status, ETCD_READY, workloads=states, service_revision=service, records=records
    )


GONE_A = workload(A, 0, current=3, gone=True)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (seen(), None),
        (seen(A, service="aaaa"), "aaaa"),
        (seen(A, B, service="aaaa", status="bbbb"), "aaaa"),  # the Service is the truth
        (seen(A, B, status="aaaa"), "aaaa"),  # the Service was deleted
        (seen(A, B, service="edited", status="aaaa"), "aaaa"),  # the Service was edited by hand
        (seen(B, service="aaaa", status="aaaa"), None),  # nothing of it is left
        (seen(B, service="aaaa", records=[A]), "aaaa"),  # lost, and it can be made again
        (seen(GONE_A, service="aaaa"), "aaaa"),
    ],
)
def test_the_revision_that_serves(observed, expected):
    assert current_revision(observed) == expected


@pytest.mark.parametrize(
    ("observed", "target", "is_ready", "expected"),
    [
        # the selector was edited before the target was ready
        (seen(A, B, service="bbbb", status="aaaa"), "bbbb", False, "aaaa"),
        # the switch, and the status could not be written
        (seen(A, B, service="bbbb", status="aaaa"), "bbbb", True, "bbbb"),
        # the switch could not be written
        (seen(A, B, service="aaaa", status="bbbb"), "bbbb", True, "aaaa"),
        # a pod fell ill after the switch
        (seen(A, B, service="bbbb", status="bbbb"), "bbbb", False, "bbbb"),
        # edited, and then a third revision was declared
        (seen(A, B, service="bbbb", status="aaaa"), "cccc", False, "aaaa"),
        # edited, and the target was dropped
        (seen(A, workload(B, 2, ready=0), service="bbbb", status="aaaa"), "aaaa", False, "aaaa"),
        # nothing of the old serves any more
        (seen(GONE_A, B, service="bbbb", status="aaaa"), "bbbb", False, "bbbb"),
        (seen(B, service="bbbb", status="aaaa", records=[A]), "bbbb", False, "bbbb"),
        (seen(A, B, service="bbbb", status=["spoilt"]), "bbbb", False, "bbbb"),
    ],
)
def test_a_selector_that_was_edited_by_hand_is_not_believed_before_the_target_is_ready(
    observed, target, is_ready, expected
):
    assert current_revision(observed, target, is_target_ready=is_ready) == expected


@pytest.mark.parametrize(
    ("observed", "is_ready", "step"),
    [
        (seen(), False, RolloutStep("bbbb")),  # the first time
        (seen(B, service="bbbb", status="bbbb"), False, RolloutStep("bbbb")),  # nothing to roll out
        (seen(A, service="aaaa"), False, RolloutStep("aaaa", (A,))),
        (seen(A, B, service="aaaa"), False, RolloutStep("aaaa", (A,))),
        # it switches, and the old stay until the switch is seen
        (seen(A, B, service="aaaa"), True, RolloutStep("bbbb", (A,))),
        (seen(A, B, service="bbbb"), True, RolloutStep("bbbb")),
        # no way back by a pod that falls ill after the switch
        (seen(A, B, service="bbbb"), False, RolloutStep("bbbb")),
        # a third revision: the unfinished target goes
        (seen(A, C, service="aaaa"), False, RolloutStep("aaaa", (A,))),
        # nothing of the old is left to protect
        (seen(B, service="aaaa", status="aaaa"), False, RolloutStep("bbbb")),
        (seen(B, service="aaaa", records=[A]), False, RolloutStep("aaaa", (A,))),
        (seen(GONE_A, service="aaaa"), False, RolloutStep("bbbb")),  # only pods that end
        (seen(A, B, service="edited", status="aaaa"), False, RolloutStep("aaaa", (A,))),
    ],
)
def test_blue_green(observed, is_ready, step):
    assert (
        next_step("BlueGreen", DeclaredRevision("bbbb"), observed, is_target_ready=is_ready) == step
    )


def test_blue_green_back_to_the_serving_revision_drops_the_target():
    assert next_step(
        "BlueGreen", DeclaredRevision("aaaa"), seen(A, B, service="aaaa"), is_target_ready=False
    ) == RolloutStep("aaaa")


@pytest.mark.parametrize(
    ("observed", "step"),
    [
        (seen(), RolloutStep("bbbb")),
        (seen(B, service="bbbb"), RolloutStep("bbbb")),
        (seen(A, service="aaaa", status="aaaa"), RolloutStep("aaaa", waits_for=OldPods(2))),
        (seen(GONE_A, service="aaaa", status="aaaa"), RolloutStep("aaaa", waits_for=OldPods(3))),
        # it is all gone: the new is made, and the Service switches
        (seen(service="aaaa", status="aaaa"), RolloutStep("bbbb")),
        # begun as BlueGreen: what is there already stays
        (seen(A, B, service="aaaa"), RolloutStep("bbbb", waits_for=OldPods(2))),
        (seen(GONE_A, B, service="bbbb"), RolloutStep("bbbb")),  # the switch was before
        # an unfinished target has to end as well
        (seen(C, service="aaaa", status="aaaa"), RolloutStep("aaaa", waits_for=OldPods(2))),
        (seen(A, status="aaaa"), RolloutStep("aaaa", waits_for=OldPods(2))),
    ],
)
def test_recreate(observed, step):
    assert next_step("Recreate", DeclaredRevision("bbbb"), observed, is_target_ready=True) == step


def test_recreate_back_to_what_is_still_ending_does_not_wait_for_itself():
    assert next_step(
        "Recreate", DeclaredRevision("aaaa"), seen(GONE_A, service="aaaa"), is_target_ready=False
    ) == RolloutStep("aaaa")


def test_recreate_names_the_first_pod_that_it_waits_for():
    pods = pod_states(A, (2, 1), ready=False, terminating=True, node="n1")
    left = workload(A, 0, current=2, gone=True, pods=pods)
    assert next_step(
        "Recreate", DeclaredRevision("bbbb"), seen(left), is_target_ready=False
    ).waits_for == OldPods(2, pods[1])
    uncounted = replace(left, current=0)  # its StatefulSet no longer counts them
    assert next_step(
        "Recreate", DeclaredRevision("bbbb"), seen(uncounted), is_target_ready=False
    ).waits_for == OldPods(2, pods[1])
