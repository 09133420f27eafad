"""The actions of a comparison, without what is as it should be."""

from typing import Any

from pdcluster_operator.writes.actions import Action
from pdcluster_operator.writes.diff import compare


def diff(*objects: Any, **options: Any) -> list[Action]:
    """As `compare`."""
    return [action for action in compare(*objects, **options) if action is not None]
