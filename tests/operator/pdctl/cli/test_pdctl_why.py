"""`pdctl why`: decisions from a file; every way in which there is none."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pdcluster_api.plan.autoscale.explain import remembered
from pdcluster_api.plan.observed.decision import DecisionStep, ScalingDecision
from pdcluster_api.plan.observed.problem import Problem
from pdctl.cli.main import app
from tests.operator.pdcluster_api.plan.autoscale.worlds import CALM, facts_of, make_spec, pool, see
from tests.schema.object_cases import minimal

AT = datetime(2026, 3, 4, 12, 0, 5, tzinfo=UTC)
SHORT = Problem(
    "CapacityShort",
    "B200 is short of 2 workers: no node takes them, and the type is left alone for ten minutes",
)


@pytest.fixture
def why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # no run of this machine is meant
    return lambda *arguments, stdin=None: CliRunner().invoke(
        app, ["why", *map(str, arguments)], input=stdin
    )


def status(number: int = 1, mode: str = "On") -> dict[str, Any]:
    spec = make_spec(prefill=[pool(2)], ratio={"min": 0.5}, budget={"total": 8})
    decision = see(spec, facts_of(spec), decode=replace(CALM, num_requests_waiting=20.0)).decision
    entries: list[dict[str, Any]] = []
    for minute in range(number):
        entries = remembered(
            entries, replace(decision, at=AT.replace(minute=minute), problems=(SHORT,))
        )
    return {"autoscaling": {"mode": mode, "lastDecisions": entries}}


def body(number: int = 1, mode: str = "On") -> dict[str, Any]:
    return {
        "metadata": {"name": "chat"},
        "spec": {"autoscale": {"mode": mode}},
        "status": status(number, mode),
    }


def scaled(**fields: Any) -> dict[str, Any]:
    """A whole object: prefill went from 2 to 3 by the decision before the last, decode from 2 to 1
    by the last.
    """
    document = minimal()
    document["spec"]["roles"]["prefill"]["pools"][0] |= {"minReplicas": 1, "maxReplicas": 3}
    document["spec"]["autoscale"] = {"mode": "On", "budget": {"total": 9}, **fields}
    steps = (
        DecisionStep("pool", "prefill/cpu", 2, 3, "the cheapest"),
        DecisionStep("pool", "decode/cpu", 2, 1, "the dearest"),
    )
    entries: list[dict[str, Any]] = []
    for hour, step in enumerate(steps):
        sizes = {("prefill", "cpu"): 3, ("decode", "cpu"): 2 - hour}
        entries = remembered(
            entries, ScalingDecision(sizes, steps=(step,), at=AT.replace(hour=hour))
        )
    roles = [
        {
            "name": role,
            "pools": [{"name": "cpu", "desired": desired, "current": current, "ready": ready}],
        }
        for role, desired, current, ready in (("prefill", 3, 3, 2), ("decode", 1, 2, 1))
    ]
    sizes = [
        {"role": "prefill", "pool": "cpu", "replicas": 3},
        {"role": "decode", "pool": "cpu", "replicas": 1},
    ]
    document["status"] = {
        "roles": roles,
        "autoscaling": {"mode": "On", "replicas": sizes, "lastDecisions": entries},
    }
    return document


def condition(kind: str, reason: str, message: str, *, is_true: bool) -> dict[str, Any]:
    return {
        "type": kind,
        "status": str(is_true),
        "reason": reason,
        "message": message,
        "lastTransitionTime": "2026-03-04T01:00:00Z",
    }


def written(folder: Path, content: Any) -> Path:
    path = folder / "status.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_table_leads_from_metric_values_to_replicas(tmp_path: Path, why: Callable[..., Any]):
    result = why("chat", "-f", written(tmp_path, body()))
    lines = result.output.splitlines()

    assert result.exit_code == 0
    assert (
        lines[0] == "chat, 2026-03-04 12:00:05 UTC, carried out: prefill/x 2 to 3, decode/x 4 to 5"
    )
    assert lines[1].split() == ["ROLE", "RULE", "FROM", "TO", "WHY"]
    words = [" ".join(line.split()) for line in lines]
    assert "decode sees num_requests_waiting 80, threshold 16" in words
    assert any(line.startswith("decode need 4 8 num_requests_waiting 80 over 16") for line in words)
    assert max(map(len, lines)) <= 100
    assert words[-2].startswith(
        "- problem CapacityShort: B200 is short of 2 workers: no node takes them"
    )
    assert words[-1].endswith("for ten minutes")


def test_what_is_there_comes_first_with_the_decision_behind_each_size(
    tmp_path: Path, why: Callable[..., Any]
):
    lines = why("-f", written(tmp_path, scaled())).output.splitlines()

    assert lines[0] == "chat, autoscale.mode On"
    assert [line.split() for line in lines[1:4]] == [
        ["POOL", "DECIDED", "DESIRED", "EXIST", "READY", "BOUNDS", "LAST", "CHANGE"],
        [
            "prefill/cpu",
            "3",
            "3",
            "3",
            "2",
            "1",
            "to",
            "3",
            "03-04",
            "00:00:05:",
            "2",
            "to",
            "3",
            "(--last",
            "2)",
        ],
        [
            "decode/cpu",
            "1",
            "1",
            "2",
            "1",
            "0",
            "to",
            "1024",
            "03-04",
            "01:00:05:",
            "2",
            "to",
            "1",
            "(below)",
        ],
    ]
    assert lines[5] == "chat, 2026-03-04 01:00:05 UTC, carried out: decode/cpu 2 to 1"


def test_bounds_are_those_of_a_schedule_that_is_on(tmp_path: Path, why: Callable[..., Any]):
    day = {
        "name": "day",
        "role": "prefill",
        "pool": "cpu",
        "start": "00:00",
        "end": "00:00",
        "maxReplicas": 7,
    }

    assert "1 to 7 (schedule day)" in why("-f", written(tmp_path, scaled(schedules=[day]))).output


def test_present_obstacles_are_shown_in_the_words_of_their_condition(
    tmp_path: Path, why: Callable[..., Any]
):
    document = scaled()
    document["status"]["conditions"] = [
        condition("Ready", "Unschedulable", "prefill: no node", is_true=False),
        condition("DiscoveryReady", "EtcdAnswers", "etcd answers", is_true=True),
        condition(
            "PrefillReady", "Unschedulable", "1 of 3 workers: no node takes it", is_true=False
        ),
        condition(
            "DecodeReady",
            "Scaling",
            "1 of 1 workers are ready; chat-decode-cpu-1 drains: 4 requests",
            is_true=True,
        ),
        condition("CapacityShort", "CapacityShort", "cpu is short of 1 worker", is_true=True),
        condition("MetricsMissing", "MetricsMissing", "that was before", is_true=False),
    ]

    assert why("-f", written(tmp_path, document)).output.splitlines()[4:8] == [
        "CapacityShort since 2026-03-04T01:00:00Z: cpu is short of 1 worker",
        "PrefillReady (Unschedulable) since 2026-03-04T01:00:00Z: 1 of 3 workers: no node takes it",
        "DecodeReady (Scaling) since 2026-03-04T01:00:00Z: 1 of 1 workers are ready; "
        "chat-decode-cpu-1",
        "  drains: 4 requests",
    ]


def test_without_a_decision_the_conditions_are_shown_all_the_same(
    tmp_path: Path, why: Callable[..., Any]
):
    document = scaled()
    missing = condition(
        "MetricsMissing",
        "MetricsMissing",
        "decode: 2 of 2 ready workers give no numbers",
        is_true=True,
    )
    stalled = condition("Stalled", "InvalidSpec", "spec.autoscale: wrong", is_true=True)
    document["status"] = {"conditions": [stalled, missing]}

    assert why("-f", written(tmp_path, document)).stderr.splitlines() == [
        "error: chat has no decision yet: the first comes within a few intervals of the first "
        "ready worker",
        "MetricsMissing since 2026-03-04T01:00:00Z: decode: 2 of 2 ready workers give no numbers",
        "Stalled (InvalidSpec) since 2026-03-04T01:00:00Z: spec.autoscale: wrong",
    ]


def test_a_roll_out_that_has_stalled_is_shown_beside_what_lacks(
    tmp_path: Path, why: Callable[..., Any]
):
    document = scaled()
    document["status"]["conditions"] = [
        condition(
            "Stalled",
            "ProgressDeadlineExceeded",
            "decode: pod chat-0 crashes; it is scaled to 0",
            is_true=True,
        ),
        condition(
            "DecodeReady", "ProgressDeadlineExceeded", "0 of 1 workers are ready", is_true=False
        ),
    ]
    lines = why("-f", written(tmp_path, document)).output.splitlines()
    told = [line for line in lines if "ProgressDeadlineExceeded" in line]
    assert [line.split()[0] for line in told] == ["Stalled", "DecodeReady"]


def test_sizes_are_shown_without_the_autoscaler_too(tmp_path: Path, why: Callable[..., Any]):
    document = scaled(mode="Off")
    del document["status"]["autoscaling"]
    lines = why("-f", written(tmp_path, document)).stderr.splitlines()

    assert lines[0].startswith(
        "error: chat has no decision: spec.autoscale.mode is Off; set it to Advise"
    )
    assert lines[2].split() == [
        "prefill/cpu",
        "-",
        "3",
        "3",
        "2",
        "1",
        "to",
        "3",
        "none",
        "remembered",
    ]


@pytest.mark.parametrize(
    "status",
    [[], "x", {"roles": 3, "conditions": "x"}, {"roles": [{"pools": [3]}, {"pools": None}, 4]}],
)
def test_a_status_that_makes_no_sense_ends_in_words(
    status: Any, tmp_path: Path, why: Callable[..., Any]
):
    result = why("-f", written(tmp_path, {**scaled(), "status": status}))

    assert (result.exit_code, result.stderr.startswith("error: chat has no decision yet")) == (
        1,
        True,
    )


def test_status_alone_and_json_from_stdin_will_do(why: Callable[..., Any]):
    for content in (status(), {"status": status()}):
        result = why("-f", "-", stdin=json.dumps(content))

        assert (result.exit_code, result.output.splitlines()[0].partition(",")[0]) == (
            0,
            "this cluster",
        )


def test_a_time_without_quotes_is_read_too(tmp_path: Path, why: Callable[..., Any]):
    text = yaml.safe_dump(body()).replace("'2026-03-04T12:00:05Z'", "2026-03-04T12:00:05Z")

    assert "2026-03-04 12:00:05 UTC" in why("-f", written(tmp_path, text)).output


def test_advice_is_called_so(tmp_path: Path, why: Callable[..., Any]):
    assert "UTC, advice only: " in why("-f", written(tmp_path, body(mode="Advise"))).output


def test_each_decision_is_called_by_the_mode_that_it_was_taken_in(
    tmp_path: Path, why: Callable[..., Any]
):
    document = body(4)
    entries = document["status"]["autoscaling"]["lastDecisions"]
    entries[2]["mode"], entries[3]["mode"] = "Advise", "On"
    lines = [
        line
        for line in why("-f", written(tmp_path, document), "--last", 4).output.splitlines()
        if line.startswith("chat,")
    ]

    assert [line.split(": ")[0].partition(" UTC")[2] for line in lines] == [
        ", carried out",
        "",
        ", advice only",
        ", carried out",
    ]


def test_earlier_decisions_are_offered_and_shown(tmp_path: Path, why: Callable[..., Any]):
    path = written(tmp_path, body(3))

    assert why("-f", path).output.splitlines()[-1] == "2 earlier decisions: --last 3"
    shown = why("-f", path, "--last", 2).output
    assert [line.split()[2] for line in shown.splitlines() if line.startswith("chat,")] == [
        "12:02:05",
        "12:01:05",
    ]
    assert shown.splitlines()[-1] == "1 earlier decision: --last 3"


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (
            {"metadata": {"name": "chat"}, "spec": {}},
            1,
            "chat has no decision: autoscaling is off; set spec.autoscale.mode to Advise (only "
            "shown) or On",
        ),
        (
            {"spec": {"autoscale": {"mode": "Off"}}},
            1,
            "this cluster has no decision: spec.autoscale.mode is Off; set it to Advise",
        ),
        (
            {"spec": {"autoscale": {"mode": "On"}}, "status": {}},
            1,
            "this cluster has no decision yet: the first comes within a few intervals",
        ),
        (
            {"status": {"autoscaling": {"lastDecisions": [{"at": "?"}]}}},
            1,
            "this cluster has no decision: autoscaling is off",
        ),
        ("a: [", 2, "not YAML: "),
        ("[" * 5000, 2, "not YAML: "),
        (
            "[1, 2]",
            2,
            "is no PDCluster and no status of one; write it by `kubectl get pdc NAME -o yaml`",
        ),
        ("kind: Pod\n", 2, "is no PDCluster and no status of one"),
    ],
)
def test_no_decision_says_what_to_do(
    content: Any, code: int, message: str, tmp_path: Path, why: Callable[..., Any]
):
    result = why("-f", written(tmp_path, content))

    assert result.exit_code == code
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


def test_another_clusters_file_is_refused(tmp_path: Path, why: Callable[..., Any]):
    result = why("talk", "-f", written(tmp_path, body()))

    assert (result.exit_code, "holds chat, not talk" in result.stderr) == (2, True)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, why: Callable[..., Any]):
    missing = why("-f", tmp_path / "none.yaml")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")

    assert (
        missing.exit_code,
        "cannot be read: No such file or directory; give the path of a file, or - for stdin"
        in missing.stderr,
    ) == (
        2,
        True,
    )
    assert "is not UTF-8 text; save it as UTF-8" in why("-f", binary).stderr


def test_a_name_or_a_file_is_needed(why: Callable[..., Any]):
    result = why()

    assert (result.exit_code, result.stderr) == (
        2,
        "error: which cluster? none runs here: give its NAME, or a file with -f\n",
    )


def test_without_a_kubeconfig_the_places_are_named(
    tmp_path: Path, why: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    result = why("chat")

    assert result.exit_code == 2
    assert result.stderr == (
        f"error: no kubeconfig: there is no file {tmp_path}/.kube/config; set KUBECONFIG, give "
        "--kubeconfig, or read a file instead\n"
    )


@pytest.mark.parametrize("text", ["a: [", "{}", "contexts: 3\ncurrent-context: x\n"])
def test_a_kubeconfig_that_cannot_be_used_is_named(
    text: str, tmp_path: Path, why: Callable[..., Any]
):
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    result = why("chat", "--kubeconfig", path)

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: kubeconfig {path} cannot be used: ")


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: u, user: {}}]
contexts: [{name: here, context: {cluster: c, user: u}}]
"""


def test_a_context_that_is_not_there_is_named_with_those_that_are(
    tmp_path: Path, why: Callable[..., Any]
):
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG)
    result = why("chat", "--kubeconfig", path, "--context", "there")

    assert (result.exit_code, result.stderr) == (
        2,
        f"error: kubeconfig {path} has no context 'there'; use one of here\n",
    )


def test_an_api_server_that_does_not_answer_is_said(tmp_path: Path, why: Callable[..., Any]):
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG)
    result = why("chat", "--kubeconfig", path)

    assert result.exit_code == 1
    assert result.stderr.startswith("error: the API server does not answer (")
    assert result.stderr.endswith("; is the context the right one?\n")
