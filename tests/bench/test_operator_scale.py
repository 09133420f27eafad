"""The operator's bench before it starts anything: its options, and waiting for what
does not come.
"""

import argparse

import pytest
from operator_load import CHILDREN as WAITED_FOR
from operator_load import NAMESPACE
from operator_scale import positive, wait_until

from pdcluster_api.apiserver.kinds import CHILDREN, DEPLOYMENT, SERVICE, STATEFUL_SET


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_a_number_of_objects_that_is_none_is_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number from 1"):
        positive(text)


def test_a_number_of_objects_is_read():
    assert positive("1000") == 1000


def test_waiting_in_vain_says_for_what():
    with pytest.raises(TimeoutError, match="not within 0 s: all children exist"):
        wait_until(lambda: False, 0.0, "all children exist")


def test_waiting_ends_when_it_is_so():
    requested: list[int] = []
    wait_until(lambda: requested.append(1) is None, 0.0, "never true")
    assert requested == [1]


def test_the_children_that_are_waited_for_are_the_last_ones_made():
    last = (STATEFUL_SET, DEPLOYMENT, SERVICE)
    assert list(WAITED_FOR) == [kind.path(NAMESPACE) for kind in last]
    assert CHILDREN[-1] is SERVICE
