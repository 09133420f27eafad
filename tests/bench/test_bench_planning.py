"""The table of plans beside another search: what each cell says, and every hole by its name."""

from planning import PlanningCase, hole_lines, row

CASE = PlanningCase("acme/model-fp8", "B200")


def test_a_row_has_both_figures_and_their_difference():
    ours = {"agg": 110.0, "disagg": 90.0, "holes": []}
    peer = {"agg": {"tokens/s/gpu": 100.0}}
    assert row(CASE, ours, peer) == ["model-fp8", "B200", "110", "100", "+10%", "90", "none", "-"]
    assert row(CASE, ours, None)[3:] == ["not run", "-", "90", "not run", "-"]


def test_a_hole_is_no_figure_and_is_named():
    ours, peer = {"holes": ["B200 TP8: no table"]}, {"hole": "ValueError: no data"}
    assert row(CASE, ours, peer)[2:] == ["none", "hole", "-", "none", "hole", "-"]
    assert [*hole_lines(CASE, ours, peer)] == [
        "- Hole, ours, model-fp8, B200 TP8: no table",
        "- Hole, peer, model-fp8 on B200: ValueError: no data",
    ]
    assert not [*hole_lines(CASE, None, None)]
