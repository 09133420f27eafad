import doctest
from types import ModuleType

import pytest

from pdcluster_worker.routing.waiting_time import (
    groups,
    load_aware,
    pooling_weight,
    rwt,
    simulate_queue,
)


@pytest.mark.parametrize("module", [simulate_queue, groups, pooling_weight, load_aware, rwt])
def test_the_worked_examples_hold(module: ModuleType) -> None:
    result = doctest.testmod(module)

    assert (result.failed, result.attempted > 0) == (0, True)
