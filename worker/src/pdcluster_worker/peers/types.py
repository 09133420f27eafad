"""Types that cross between peers, dispatch and server."""

from dataclasses import dataclass
from typing import Literal

from pdcluster_worker.engine.messages import Token

PrefillMode = Literal["auto", "local", "remote"]
"""Where a client wants the prefill: its extension field `pdcluster.prefill`."""

PrefillPlace = Literal["local", "remote"]
"""Where the first token was made."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One token of one choice; `prefill` is set on a choice's first token."""

    token: Token
    prefill: PrefillPlace | None = None
    index: int = 0
