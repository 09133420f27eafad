"""Layouts whose steps the tables lack are holes, and no error of a plan."""

import pytest

from pdctl.sizing import tables
from pdctl.sizing.objective import Objective
from pdctl.sizing.profile import RankLayout

GOAL = Objective(1000, 100, 1.0, 0.05)


class _Handle:
    def __init__(self, missing: str) -> None:
        self._missing = missing

    def _taken(self, name: str) -> float:
        if name == self._missing:
            raise ValueError(f"no data of {name}")
        return 1.0

    def predict_prefill_latency(self, prompts: int, length: int, cached: int = 0) -> float:
        return self._taken("prefill")

    def decode_step_latency(self, streams: int, *lengths: int) -> float:
        return self._taken("decode")

    def run_static_per_op(self, **sizes: int) -> tuple[list[object], list[object]]:
        self._taken("operations")
        return [], []


@pytest.mark.parametrize("missing", ["prefill", "decode", "operations"])
def test_layout_without_steps_is_a_hole(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    found = tables.SiliconTables("m", "vllm")
    monkeypatch.setattr(tables, "_package_errors", lambda: (ValueError,))
    monkeypatch.setattr(found, "_kv_tokens", lambda target, modes: {2048: 10_000})
    monkeypatch.setattr(found, "_compiled", lambda target, modes: _Handle(missing))
    assert found.profiles("B200", [RankLayout(2)], GOAL) == []
    assert found.holes == {f"no data of {missing}": ["B200 TP2"]}
