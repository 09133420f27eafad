import doctest
from types import ModuleType

import pytest

from pdcluster_worker.routing.waiting_time import drain, groups, likeness, load_aware, rwt


@pytest.mark.parametrize("module", [drain, groups, likeness, load_aware, rwt])
def test_the_worked_examples_hold(module: ModuleType) -> None:
    result = doctest.testmod(module)

    assert (result.failed, result.attempted > 0) == (0, True)
