"""Each recording of the chart over the series of two PDClusters: its labels and its value."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.contract.prometheus_rules import RULES_FILE, check_values, needs_promtool, series

pytestmark = needs_promtool

RECORDS = [
    rule["record"]
    for group in yaml.safe_load(RULES_FILE.read_text())["groups"]
    for rule in group["rules"]
    if "record" in rule
]
SLO = "pdcluster_qos_slo_total"
LATENCY = "pdcluster_{}_seconds_bucket"
ACCELERATORS = "pdcluster_operator_accelerators"
PRICE = "pdcluster_operator_accelerator_price_per_hour"

WORKED = f"""
{SLO}{{objective="ttft",priority="high",outcome="met",pod="a"}} 3
{SLO}{{objective="ttft",priority="high",outcome="met",pod="b"}} 1
{SLO}{{objective="ttft",priority="high",outcome="missed",pod="a"}} 1
{SLO}{{objective="ttft",priority="low",outcome="met",pod="a"}} 0
{SLO}{{objective="ttft",priority="low",outcome="missed",pod="a"}} 5
{SLO}{{objective="tpot",priority="high",outcome="met",pod="a"}} 2
{SLO}{{objective="tpot",priority="high",outcome="missed",pod="a"}} 2
pdcluster_request_rejected_total{{reason="queue_full",pod="a"}} 1
pdcluster_request_rejected_total{{reason="not_ready",pod="b"}} 1
pdcluster_request_rejected_total{{reason="invalid_request",pod="a"}} 7
pdcluster_request_success_total{{finish_reason="stop",pod="a"}} 5
pdcluster_request_success_total{{finish_reason="length",pod="b"}} 1
pdcluster_long_prompts_total{{prefill="remote",pod="a"}} 3
pdcluster_long_prompts_total{{prefill="remote",pod="b"}} 1
pdcluster_remote_prefill_total{{outcome="ok",pod="a"}} 2
pdcluster_remote_prefill_total{{outcome="ok",pod="b"}} 2
pdcluster_generation_tokens_total{{role="decode",pool="cpu",pod="a"}} 100
pdcluster_generation_tokens_total{{role="decode",pool="cpu",pod="b"}} 50
{LATENCY.format("time_to_first_token")}{{le="2.5",pod="a"}} 3
{LATENCY.format("time_to_first_token")}{{le="2.5",pod="b"}} 2
{LATENCY.format("time_per_output_token")}{{le="0.1",pod="a"}} 4
pdcluster_operator_slo_seconds{{objective="ttft",pod="o-1"}} 4
pdcluster_operator_slo_seconds{{objective="tpot",pod="o-1"}} 0.05
{ACCELERATORS}{{role="decode",pool="b300",gpu="B300",state="desired",pod="o-1"}} 16
{ACCELERATORS}{{role="decode",pool="b300",gpu="B300",state="desired",pod="o-2"}} 16
{ACCELERATORS}{{role="decode",pool="h100",gpu="H100",state="desired",pod="o-1"}} 4
{ACCELERATORS}{{role="decode",pool="b300",gpu="B300",state="ready",pod="o-1"}} 12
{PRICE}{{gpu="B300",pod="o-1"}} 6.5
{PRICE}{{gpu="B300",pod="o-2"}} 6.5
"""
POOL = 'role="decode",pool="{}",gpu="{}",state="{}"'
EXPECTED: Mapping[str, Mapping[str, float]] = {
    "namespace_pdcluster_objective_priority_outcome:pdcluster_qos_slo:rate5m": {
        'objective="ttft",priority="high",outcome="met"': 4,
        'objective="ttft",priority="high",outcome="missed"': 1,
        'objective="ttft",priority="low",outcome="met"': 0,
        'objective="ttft",priority="low",outcome="missed"': 5,
        'objective="tpot",priority="high",outcome="met"': 2,
        'objective="tpot",priority="high",outcome="missed"': 2,
    },
    "namespace_pdcluster_objective_priority:pdcluster_qos_slo_met:ratio_rate5m": {
        'objective="ttft",priority="high"': 0.8,
        'objective="ttft",priority="low"': 0,
        'objective="tpot",priority="high"': 0.5,
    },
    "namespace_pdcluster:pdcluster_qos_slo_met:rate5m": {"": 2},
    "namespace_pdcluster:pdcluster_request_refused:rate5m": {"": 2},
    "namespace_pdcluster:pdcluster_request_refused:ratio_rate5m": {"": 0.25},
    "namespace_pdcluster_prefill:pdcluster_long_prompts:rate5m": {'prefill="remote"': 4},
    "namespace_pdcluster_outcome:pdcluster_remote_prefill:rate5m": {'outcome="ok"': 4},
    "namespace_pdcluster_role_pool:pdcluster_generation_tokens:rate5m": {
        'role="decode",pool="cpu"': 150
    },
    "namespace_pdcluster_le:pdcluster_time_to_first_token_seconds_bucket:rate5m": {'le="2.5"': 5},
    "namespace_pdcluster_le:pdcluster_time_per_output_token_seconds_bucket:rate5m": {'le="0.1"': 4},
    "namespace_pdcluster:pdcluster_time_to_first_token_limit_seconds:max": {"": 4},
    "namespace_pdcluster:pdcluster_time_per_output_token_limit_seconds:max": {"": 0.1},
    "namespace_pdcluster_role_pool_gpu_state:pdcluster_operator_accelerators:max": {
        POOL.format("b300", "B300", "desired"): 16,
        POOL.format("h100", "H100", "desired"): 4,
        POOL.format("b300", "B300", "ready"): 12,
    },
    "namespace_pdcluster:pdcluster_cost_per_hour:sum": {"": 104},
}


def check(folder: Path, data: str, expected: Mapping[str, Mapping[str, float]]) -> None:
    """Compare recordings of the PDCluster `chat`, beside another one that has traffic."""
    scope = 'namespace="models",pdcluster="chat"'
    both = [
        *series(data, namespace="models", pdcluster="chat"),
        *series(WORKED, namespace="models", pdcluster="other"),
    ]
    wanted = {
        f'{name}{{pdcluster="chat"}}': [
            (f"{name}{{{scope}{',' if labels else ''}{labels}}}", value)
            for labels, value in samples.items()
        ]
        for name, samples in expected.items()
    }
    check_values(folder, both, wanted)


def test_every_recording_has_a_case() -> None:
    assert list(EXPECTED) == RECORDS


def test_a_recording_is_of_one_pdcluster_over_its_workers(tmp_path: Path) -> None:
    check(tmp_path, WORKED, EXPECTED)


SLO_MET = "namespace_pdcluster:pdcluster_qos_slo_met:rate5m"
RATIO = "namespace_pdcluster_objective_priority:pdcluster_qos_slo_met:ratio_rate5m"
REFUSED = "namespace_pdcluster:pdcluster_request_refused:ratio_rate5m"
TTFT = f'{SLO}{{objective="ttft",priority="normal",outcome="met"}}'
NO_TPOT = "\n".join(
    f'{SLO}{{objective="tpot",priority="normal",outcome="{outcome}"}} 0'
    for outcome in ("met", "missed")
)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        # An objective that is not set is not one that every answer missed.
        (
            f"{TTFT} 3\n{NO_TPOT}",
            {SLO_MET: {"": 3}, RATIO: {'objective="ttft",priority="normal"': 1}},
        ),
        (f"{TTFT} 0\n{NO_TPOT}", {SLO_MET: {}, RATIO: {}}),  # no traffic
        (
            'pdcluster_request_rejected_total{reason="queue_full"} 0\n'
            'pdcluster_request_success_total{finish_reason="stop"} 0',
            {REFUSED: {}},
        ),
        (
            'pdcluster_request_rejected_total{reason="queue_full"} 2\n'
            'pdcluster_request_success_total{finish_reason="stop"} 0',
            {REFUSED: {"": 1}},
        ),
        # An operator that is away leaves the latencies their limits.
        (
            "\n".join(
                f'{LATENCY.format(name)}{{le="+Inf"}} 0'
                for name in ("time_to_first_token", "time_per_output_token")
            ),
            {
                "namespace_pdcluster:pdcluster_time_to_first_token_limit_seconds:max": {"": 2.5},
                "namespace_pdcluster:pdcluster_time_per_output_token_limit_seconds:max": {"": 0.1},
            },
        ),
        (
            f'{ACCELERATORS}{{role="decode",pool="c",gpu="cpu",state="desired"}} 2',  # no prices
            {"namespace_pdcluster:pdcluster_cost_per_hour:sum": {}},
        ),
    ],
)
def test_a_recording_of_what_is_not_there(
    tmp_path: Path, data: str, expected: Mapping[str, Mapping[str, float]]
) -> None:
    check(tmp_path, data, expected)
