"""The gate for another reconcile: open again when the last write has ended."""

import pytest

from pdcluster_operator.queue.runner import WriteGate


def test_it_opens_when_the_last_write_has_ended():
    opened: list[bool] = []
    gate = WriteGate()
    gate.on_open = lambda: opened.append(gate.is_open)
    with gate.closed():
        with gate.closed():
            assert not gate.is_open
        assert (gate.is_open, opened) == (False, [])
    assert (gate.is_open, opened) == (True, [True])


def test_an_error_opens_it_too():
    gate = WriteGate()
    with pytest.raises(ValueError, match="broken"), gate.closed():
        raise ValueError("broken")
    assert gate.is_open
