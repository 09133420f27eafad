"""Challenges that a caller answers with a proof, each of them once.

Random, made by this process, and good for a short time: a proof that was read on the network
is worth nothing, also after a restart.  Nothing is kept for one that is given out, so that
strangers cost no memory by asking for many.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

SECONDS = 60.0
"""From giving one out to its proof, over one connection after the other."""


class Challenges:
    """Those of one route.  clock: seconds that never jump"""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._used: dict[str, float] = {}

    def new(self) -> str:
        """One more, in letters, digits and dots."""
        text = f"{self._clock():.3f}.{secrets.token_hex(16)}"
        return f"{text}.{self._mac(text)}"

    def use(self, challenge: str) -> bool:
        """Take one of which the proof is right; False = not ours, too old, or taken before."""
        text, _, mac = challenge.rpartition(".")
        if not hmac.compare_digest(mac.encode(), self._mac(text).encode()):
            return False
        made, now = float(text[: text.rindex(".")]), self._clock()
        self._used = {used: at for used, at in self._used.items() if now - at <= SECONDS}
        if now - made > SECONDS or challenge in self._used:
            return False
        self._used[challenge] = made
        return True

    def _mac(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()
