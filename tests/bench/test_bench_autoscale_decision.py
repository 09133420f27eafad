"""The bench of decisions: its clusters really rest, grow and shrink, and it fails
over its limit.
"""

import autoscale_decision
import pytest


def test_bench_decides_for_clusters_that_rest_grow_and_shrink():
    spec = autoscale_decision.spec_of(4)
    sums = [
        sum(autoscale_decision.case(spec, 4, share).decide().decision.replicas.values())
        for share in autoscale_decision.LOADS
    ]

    assert sums[0] == 16
    assert sums[1] > 16 > sums[2]
    assert autoscale_decision.run(clusters=3, workers=4, times=2).num_changed == 2


@pytest.mark.parametrize(("seconds", "status"), [(0.2, 0), (1.0, 1)])
def test_bench_of_decisions_fails_over_its_limit(
    seconds: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    figures = autoscale_decision.Figures(100, 64, [0.1, seconds], 66)
    monkeypatch.setattr(autoscale_decision, "run", lambda clusters, workers, times: figures)

    assert autoscale_decision.main([]) == status
    assert "100 clusters of 4 pools of 64 workers" in capsys.readouterr().out
