"""Workers of a plan that were really cut: a StatefulSet that could not be written cut none."""

from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_operator.reconcile.apply_plan import gone

PODS = ("chat-decode-cpu-r1-3", "chat-prefill-cpu-r1-1")


def test_a_refused_stateful_set_cuts_no_worker_and_other_refusals_do_not_matter():
    assert gone(PODS, ()) == list(PODS)
    assert gone(PODS, [WriteFailure("PodMonitor chat", "Forbidden", "no right")]) == list(PODS)
    assert gone(
        PODS, [WriteFailure("StatefulSet chat-decode-cpu-r1", "Forbidden", "no right")]
    ) == ["chat-prefill-cpu-r1-1"]
