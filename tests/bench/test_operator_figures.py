"""Figures of the operator's bench, on pages and logs that are written out."""

import re
from dataclasses import replace

import pytest
from operator_figures import (
    Pass,
    Phase,
    Samples,
    WorkerCost,
    answers,
    calls_table,
    cost_table,
    passes_table,
    read_passes,
    server_writes,
)

CALLS = """
# TYPE pdcluster_operator_api_calls counter
pdcluster_operator_api_calls_total{verb="apply",kind="Service",code="201"} 8
pdcluster_operator_api_calls_total{verb="apply",kind="Secret",code="201"} 3
pdcluster_operator_api_calls_total{verb="apply",kind="Secret",code="409"} 1
pdcluster_operator_api_calls_total{verb="get",kind="Lease",code="200"} 2
"""
SERVER = """
# TYPE apiserver_request counter
apiserver_request_total{verb="APPLY",resource="services",code="201"} 8
apiserver_request_total{verb="PATCH",resource="services",code="200"} 1
apiserver_request_total{verb="PUT",resource="leases",code="200"} 5
apiserver_request_total{verb="GET",resource="services",code="200"} 70
apiserver_request_total{verb="WATCH",resource="services",code="200"} 1
"""
_ENDED = "DEBUG pdcluster_operator.controller reconcile ended key=bench/chat-0"
LOG = f"""\
2026-01-01 00:00:00,000 {_ENDED} wrote=True seconds=0.081500
2026-01-01 00:00:00,100 INFO pdcluster_operator.writes.apply create object=Secret chat-ca
2026-01-01 00:00:00,200 {_ENDED} wrote=False seconds=0.007000
2026-01-01 00:00:00,200 {_ENDED} wrote=Fal"""


def cells(line: str) -> list[str]:
    return [part.strip() for part in line.strip("|").split("|")]


def phase(*, calls: str = CALLS, server: str = SERVER, passes: tuple[Pass, ...] = ()) -> str:
    made = Phase(
        "Rest",
        2.0,
        Samples.parse(calls),
        Samples.parse(server),
        passes,
        0.5,
        100 * 2**20,
        120 * 2**20,
    )
    return "\n".join(made.lines(objects=4))


def test_operator_samples_count_what_was_added_between_two_pages():
    before = Samples.parse('# TYPE a counter\na_total{x="1"} 3\na_total{x="2"} 5\n')
    after = Samples.parse(
        '# TYPE a counter\na_total{x="1"} 4\na_total{x="2"} 5\na_total{x="3"} 7\n'
    )

    assert (after - before).value("a_total") == 8
    assert (after - before).by("a_total", "x") == {("1",): 1, ("3",): 7}
    assert (after - before).by("a_total", "missing") == {("",): 8}


def test_operator_samples_of_another_name_are_none():
    assert Samples().value("a_total") == 0
    assert Samples.parse(CALLS).by("a_total", "verb") == {}


def test_operator_samples_refuse_what_is_no_page():
    with pytest.raises(ValueError, match=r"\S"):
        Samples.parse("<html>not metrics</html>")


def test_operator_passes_are_whole_lines_of_the_log():
    assert read_passes(LOG) == [Pass(True, 0.0815), Pass(False, 0.007)]
    assert read_passes("") == []


def test_operator_passes_table_has_each_kind_and_all():
    passes = [Pass(True, seconds / 1000) for seconds in range(1, 101)] + [Pass(False, 0.5)]

    writing, reading, both = (cells(line) for line in passes_table(passes)[2:])

    assert writing == ["that write", "100", "50.5", "99.0", "100.0"]
    assert reading == ["that do not write", "1", "500.0", "500.0", "500.0"]
    assert both == ["all", "101", "51.0", "100.0", "500.0"]


def test_operator_passes_table_without_a_pass_has_no_figure():
    assert [cells(line)[1:] for line in passes_table([])[2:]] == [["0", "-", "-", "-"]] * 3


def test_operator_calls_table_sums_by_verb_and_divides_by_the_objects():
    rows = [cells(line) for line in calls_table(Samples.parse(CALLS), objects=4)[2:]]

    assert rows == [
        ["apply", "12", "3.00", "Secret 4, Service 8"],
        ["get", "2", "0.50", "Lease 2"],
        ["all", "14", "3.50", ""],
    ]


def test_operator_calls_table_without_a_call_has_the_sum_alone():
    assert [cells(line) for line in calls_table(Samples(), objects=4)[2:]] == [
        ["all", "0", "0.00", ""]
    ]


def test_operator_answers_are_counted_by_status():
    assert answers(Samples.parse(CALLS)) == {"200": 2, "201": 11, "409": 1}


def test_server_writes_are_those_of_writing_verbs_by_resource():
    assert server_writes(Samples.parse(SERVER)) == {"services": 9, "leases": 5}


def test_phase_tells_writes_by_resource_and_leases_apart():
    report = phase(passes=(Pass(True, 0.1),))

    assert "### Rest" in report
    assert "2.0 s; operator: CPU 0.5 s, RSS 100 MiB at the end, 120 MiB at its peak" in report
    assert "Leases aside: 9 (services 9); of Leases: 5" in report
    assert (
        "with an exception: 0; answers to the operator by status: 14 (200 2, 201 11, 409 1)"
        in report
    )
    assert "| that write | 1 | 100.0 | 100.0 | 100.0 |" in report
    assert "| all | 14 | 3.50 | |" in report


def test_phase_says_its_notes_first():
    made = Phase("Rest", 2.0, Samples(), Samples(), (), 0.5, 1, 1, notes=["Converged: after 3 s"])
    assert made.lines(objects=1)[:3] == ["### Rest", "", "- Converged: after 3 s"]


def test_phase_at_rest_says_zero():
    report = phase(calls="", server="")

    assert "Leases aside: 0; of Leases: 0" in report
    assert re.search(r"^\| all \| 0 \| - \| - \| - \|$", report, re.MULTILINE)


def test_phase_tells_of_passes_that_raised():
    errors = (
        "# TYPE pdcluster_operator_reconcile_errors "
        "counter\npdcluster_operator_reconcile_errors_total 2\n"
    )

    assert "with an exception: 2;" in phase(calls=CALLS + errors)


def test_cost_of_a_worker_is_its_share_of_each_phase_and_of_the_memory_that_was_added():
    calls, server, mib = Samples.parse(CALLS), Samples.parse(SERVER), 2**20
    phases = [
        Phase("", 2.0, calls, server, (), cpu, rss, rss)
        for cpu, rss in ((0.5, mib), (0.1, 5 * mib), (0.2, 9 * mib))
    ]
    cost = WorkerCost.of(phases, mib, num_workers=4)

    assert cost == WorkerCost(125.0, 3.5, 12.5, 2.25, 50.0, 3.5, 1024.0)
    one, two = cost_table({"one": cost, "two": replace(cost, kib=512.0)})[-2:]
    assert (cells(one)[1:], cells(two)[1:]) == (["3.5", "3.5", "1.00"], ["1.02e+03", "512", "0.50"])
