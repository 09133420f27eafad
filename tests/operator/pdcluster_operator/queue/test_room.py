"""Room for another reconcile: free again when the last that took it has left it."""

import pytest

from pdcluster_operator.queue.room import Room


def test_it_is_free_when_the_last_has_left_it():
    freed: list[bool] = []
    room = Room()
    room.on_free = lambda: freed.append(room.is_free)
    with room.taken():
        with room.taken():
            assert not room.is_free
        assert (room.is_free, freed) == (False, [])
    assert (room.is_free, freed) == (True, [True])


def test_an_error_leaves_it_too():
    room = Room()
    with pytest.raises(ValueError, match="broken"), room.taken():
        raise ValueError("broken")
    assert room.is_free
