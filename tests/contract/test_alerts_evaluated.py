"""Each alert of the chart over two PDClusters: Prometheus raises it for the one that it is about,
after its time, and for no other.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.contract.prometheus_rules import (
    RULES_FILE,
    Raised,
    check_raised,
    check_waits,
    needs_promtool,
    promtool,
    series,
)

pytestmark = needs_promtool

RECORDS, RULES, OPERATOR_RULES = (
    {rule.get("alert", rule.get("record")): rule for rule in group["rules"]}
    for group in yaml.safe_load(RULES_FILE.read_text())["groups"]
)


def ttft(
    fast: float, name: str = "time_to_first_token_seconds", bounds: tuple[str, str] = ("2.5", "5.0")
) -> str:
    """A histogram of one observation per second; fast: the share below the first bound, the rest is
    below the second.
    """
    numbers = {bounds[0]: fast, bounds[1]: 1.0, "+Inf": 1.0}
    return "\n".join(
        f'pdcluster_{name}_bucket{{le="{bound}"}} {number}' for bound, number in numbers.items()
    )


def slo(ttft_seconds: float = 0.5, tpot_seconds: float = 0.0) -> str:
    lines = {"ttft": ttft_seconds, "tpot": tpot_seconds}
    return "\n".join(
        f'pdcluster_operator_slo_seconds{{objective="{name}"}} {seconds}'
        for name, seconds in lines.items()
    )


def tpot(fast: float) -> str:
    return ttft(fast, "time_per_output_token_seconds", ("0.1", "0.15"))


def queue(fast: float) -> str:
    head = "pdcluster_remote_prefill_phase_seconds"
    return f'{head}_bucket{{phase="queue",le="1.0"}} {fast}\n{head}_count{{phase="queue"}} 1'


def problem(reason: str) -> str:
    return f'pdcluster_operator_autoscale_problems{{reason="{reason}"}} 1'


def condition(kind: str, reason: str, value: int) -> str:
    return f'pdcluster_operator_condition{{type="{kind}",reason="{reason}"}} {value}'


def certificate(days: int) -> str:
    return f"pdcluster_operator_certificate_expiry_timestamp_seconds {days * 86400}"


RUNS = 'pdcluster_num_requests_running{role="decode",pod="a"} 0'
SERVES = 'pdcluster_operator_serving_replicas{role="decode"} 2'
ROUTES = 'pdcluster_operator_serving_replicas{role="router"} 1'
READY_PEERS = 'pdcluster_peers{role="decode",exported_role="prefill",state="ready",pod="a"}'
QOS = 'pdcluster_qos_slo_total{objective="ttft",priority="high",'
LOW = '{priority="low",reason="slo_ttft"}'
REJECTED = 'pdcluster_request_rejected_total{reason="queue_full"}'
DECODE = '{role="decode",pool="cpu",pod="a"}'
STEPS = 'pdcluster_engine_step_tokens_sum{role="decode",pool="cpu",pod="a",'

CASES = {
    "PDClusterNoIngressWorker": (SERVES, f"{SERVES}\n{RUNS}\n{READY_PEERS} 1"),
    "PDClusterNoRouter": (
        ROUTES,
        f'{ROUTES}\npdcluster_num_requests_running{{role="router",pod="r"}} 3',
    ),
    "PDClusterRequestsRefused": (
        f"{REJECTED} 1\npdcluster_request_success_total 18",
        f"{REJECTED} 1\npdcluster_request_success_total 99",
    ),
    "PDClusterEngineStalled": (
        'pdcluster_engine_stalled{pod="a"} 1',
        'pdcluster_engine_stalled{pod="a"} 0',
    ),
    "PDClusterHighPriorityLate": (
        f'{QOS}outcome="missed"}} 1\n{QOS}outcome="met"}} 9',
        f'{QOS}outcome="missed"}} 1\n{QOS}outcome="met"}} 99',
    ),
    "PDClusterLowPriorityRefused": (
        f'pdcluster_qos_rejected_total{LOW} 2\npdcluster_qos_admitted_total{{priority="low"}} 1',
        f'pdcluster_qos_rejected_total{LOW} 2\npdcluster_qos_admitted_total{{priority="low"}} 3',
    ),
    "PDClusterSlowFirstToken": (f"{ttft(0.6)}\n{slo()}", f"{ttft(0.8)}\n{slo()}"),
    "PDClusterSlowOutputTokens": (f"{tpot(0.6)}\n{slo()}", f"{tpot(0.8)}\n{slo()}"),
    "PDClusterPrefillQueueGrowing": (
        'pdcluster_prefill_queue_tokens{pod="a"} 5000\npdcluster_prefill_tokens_total{pod="a"} 100',
        'pdcluster_prefill_queue_tokens{pod="a"} 2000\npdcluster_prefill_tokens_total{pod="a"} 100',
    ),
    "PDClusterNoPrefillWorker": (f"{RUNS}\n{READY_PEERS} 0", f"{RUNS}\n{READY_PEERS} 1"),
    "PDClusterRemotePrefillFailing": (
        'pdcluster_remote_prefill_total{outcome="stalled"} '
        '1\npdcluster_remote_prefill_total{outcome="ok"} 10',
        'pdcluster_remote_prefill_total{outcome="stalled"} '
        '1\npdcluster_remote_prefill_total{outcome="ok"} 100',
    ),
    "PDClusterNotDisaggregating": (
        'pdcluster_long_prompts_total{prefill="local"} '
        '1\npdcluster_long_prompts_total{prefill="remote"} 0.1',
        'pdcluster_long_prompts_total{prefill="local"} '
        '0.005\npdcluster_long_prompts_total{prefill="remote"} 0',
    ),
    "PDClusterPairRefused": (
        'pdcluster_peer_refused_total{reason="weights"} 0.01',
        'pdcluster_peer_refused_total{reason="weights"} 0',
    ),
    "PDClusterKVTransferNotVerified": (
        condition("KVTransferVerified", "TransferSlow", 0),
        condition("KVTransferVerified", "KVMoved", 1),
    ),
    "PDClusterTransferBlocksHeld": (
        'pdcluster_fences_overdue{pod="a"} 1',
        'pdcluster_fences_overdue{pod="a"} 0',
    ),
    "PDClusterKVTierStopped": (
        'pdcluster_kv_tier_stopped{pod="a",tier="disk"} 1',
        'pdcluster_kv_tier_stopped{pod="a",tier="disk"} 0',
    ),
    "PDClusterKVCacheFull": (
        f"pdcluster_kv_cache_usage_ratio{DECODE} 0.99",
        f"pdcluster_kv_cache_usage_ratio{DECODE} "
        f'0.9\npdcluster_kv_cache_usage_ratio{{role="prefill",pool="cpu",pod="p"}} 0.99',
    ),
    "PDClusterPreemptions": (
        f"pdcluster_preemptions_total{DECODE} 0.2",
        f"pdcluster_preemptions_total{DECODE} 0.05",
    ),
    "PDClusterRecomputing": (
        f'{STEPS}kind="recomputed"}} 2\n{STEPS}kind="decode"}} 8',
        f'{STEPS}kind="recomputed"}} 2\n{STEPS}kind="decode"}} 80',
    ),
    "PDClusterPrefillWorkersQueue": (queue(0.5), queue(0.9)),
    "PDClusterBlocksQuarantined": (
        'pdcluster_kv_blocks{pod="a",state="quarantined"} '
        '20\npdcluster_kv_blocks{pod="a",state="free"} 80',
        'pdcluster_kv_blocks{pod="a",state="quarantined"} '
        '2\npdcluster_kv_blocks{pod="a",state="free"} 98',
    ),
    "PDClusterDrainSlow": (
        'pdcluster_draining{pod="a"} 1',
        f'{SERVES}\n{RUNS}\n{READY_PEERS} 1\npdcluster_draining{{pod="a"}} 0',
    ),
    "PDClusterStalled": (condition("Stalled", "InvalidSpec", 1), ""),
    "PDClusterNotReady": (condition("Ready", "Starting", 0), condition("Ready", "AsDeclared", 1)),
    "PDClusterWritesRefused": (
        condition("Ready", "NameTaken", 0),
        condition("Ready", "AsDeclared", 1),
    ),
    "PDClusterCertificateEnds": (certificate(29), certificate(31)),
    "PDClusterOperatorSilent": (
        f'{RUNS}\n{READY_PEERS} 1\npdcluster_draining{{pod="a"}} 0',
        f'{SERVES}\n{RUNS}\n{READY_PEERS} 1\npdcluster_draining{{pod="a"}} 0',
    ),
    "PDClusterDrainCut": (
        "pdcluster_operator_drains_cut_total 0.01",
        "pdcluster_operator_drains_cut_total 0",
    ),
    "PDClusterAutoscalerMetricsMissing": (problem("MetricsMissing"), ""),
    "PDClusterAutoscalerCapacityShort": (problem("CapacityShort"), ""),
    "PDClusterAutoscalerLimited": (problem("ScalingLimited"), ""),
    "PDClusterAutoscalerConfined": (problem("BudgetTooSmall"), ""),
}


OPERATOR_CASES = {
    "PDClusterOperatorNotLeading": (
        'pdcluster_operator_is_leader{pod="o-1"} 0\npdcluster_operator_is_leader{pod="o-2"} 0',
        'pdcluster_operator_is_leader{pod="o-1"} 0\npdcluster_operator_is_leader{pod="o-2"} 1',
    ),
    "PDClusterReconcileErrors": (
        "pdcluster_operator_reconcile_errors_total 0.1",
        "pdcluster_operator_reconcile_errors_total 0",
    ),
}


Raises = Callable[[str, str, Raised], None]


@pytest.fixture
def raises(tmp_path: Path) -> Raises:
    """A check over two PDClusters in one Prometheus; in another namespace a third has the name of
    the sick one.
    """

    def check(sick: str, well: str, raised: Raised) -> None:
        check_raised(tmp_path, two(sick, well), raised)

    return check


def two(sick: str, well: str) -> list[dict[str, str]]:
    return [
        *series(sick, namespace="models", pdcluster="sick"),
        *series(well, namespace="models", pdcluster="well"),
        *series(well, namespace="research", pdcluster="sick"),
    ]


SICK = [("models", "sick")]
LATE = dict.fromkeys(("PDClusterSlowFirstToken", "PDClusterSlowOutputTokens"), SICK)
ALSO = {"PDClusterWritesRefused": {"PDClusterNotReady": SICK}}


def test_prometheus_takes_the_rules() -> None:
    found = promtool("check", "rules", RULES_FILE)

    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{sum(map(len, (RECORDS, RULES, OPERATOR_RULES)))} rules found" in found.stdout


def test_every_alert_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()
    assert OPERATOR_CASES.keys() == OPERATOR_RULES.keys()


@pytest.mark.parametrize("alert", OPERATOR_RULES)
def test_an_alert_of_the_operator_is_raised_for_the_one_that_it_is_about(
    alert: str, tmp_path: Path
) -> None:
    sick, well = OPERATOR_CASES[alert]
    data = [*series(sick, namespace="sick"), *series(well, namespace="well")]

    check_raised(tmp_path, data, {alert: [("sick", "")]})


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_is_raised_for_the_pdcluster_that_it_is_about_and_for_no_other(
    alert: str, raises: Raises
) -> None:
    raises(*CASES[alert], {alert: SICK, **ALSO.get(alert, {})})


@pytest.mark.parametrize("alert", [name for name, rule in RULES.items() if rule["for"] != "0m"])
def test_an_alert_waits_for_its_time(alert: str, tmp_path: Path) -> None:
    duration = RULES[alert]["for"]
    minutes = float(duration[:-1]) * {"m": 1, "h": 60}[duration[-1]]

    check_waits(tmp_path, two(*CASES[alert]), minutes - 1)


def test_each_pdcluster_has_the_threshold_of_its_own_objective(raises: Raises) -> None:
    """The same latencies: 4 s are late where the objective is 0.5 s, and in time where it is 10 s;
    0.12 s likewise.
    """
    slow = f"{ttft(0.1)}\n{tpot(0.1)}"

    raises(f"{slow}\n{slo(0.5)}", f"{slow}\n{slo(10.0, 0.2)}", LATE)


def test_latencies_are_judged_while_the_operator_says_nothing(raises: Raises) -> None:
    raises(f"{ttft(0.1)}\n{tpot(0.1)}", f"{ttft(0.9)}\n{tpot(0.9)}", LATE)


def test_workers_that_end_with_their_pdcluster_need_no_operator(raises: Raises) -> None:
    ending = f'{RUNS}\n{READY_PEERS} 1\npdcluster_draining{{pod="a"}} 1'

    raises(ending, "", {"PDClusterDrainSlow": SICK})


def test_an_objective_of_less_than_a_user_notices_raises_no_alert(raises: Raises) -> None:
    raises(f"{ttft(0.9)}\n{slo(0.01)}", "", {})


def test_a_pdcluster_without_replicas_on_purpose_raises_no_alert(raises: Raises) -> None:
    idle = (
        'pdcluster_operator_serving_replicas{role="decode"} '
        '0\npdcluster_operator_serving_replicas{role="router"} 0'
    )

    raises(SERVES, idle, {"PDClusterNoIngressWorker": SICK})


def test_decode_workers_behind_routers_that_are_gone_raise_the_alert_of_the_routers_alone(
    raises: Raises,
) -> None:
    raises(f"{ROUTES}\n{SERVES}\n{RUNS}\n{READY_PEERS} 1", "", {"PDClusterNoRouter": SICK})


def test_a_change_of_the_leading_operator_raises_nothing_twice(raises: Raises) -> None:
    """Series of both replicas are there for some minutes, and differ by their pod."""
    both = "\n".join(
        f'pdcluster_operator_slo_seconds{{objective="ttft",pod="{pod}"}} 0.5'
        for pod in ("o-1", "o-2")
    )

    raises(f"{ttft(0.1)}\n{both}", "", {"PDClusterSlowFirstToken": SICK})
