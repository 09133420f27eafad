"""The receiving side of a carrier on one connection: attach, probe, then each payload."""

import time
from collections.abc import Callable

from pdcluster_worker.kv_transfer import wire
from pdcluster_worker.kv_transfer.carrier import (
    SLOT_SECONDS,
    Carrier,
    CarrierError,
    CarrierFetch,
    CarrierIncoming,
    Slot,
)

PROBE_SECONDS = 3.0
"""For a probe to come: what a carrier does not bring in this time goes over the connection."""

FETCH_SECONDS = 60.0
"""Without a payload that was announced; then its connection ends."""

_FIRST_PAUSE = 20e-6
_LONGEST_PAUSE = 1e-3


class CarrierReceiver:
    """One per connection; `close` with it.  is_stopped: True once the port is closing."""

    def __init__(self, carrier: Carrier, is_stopped: Callable[[], bool]) -> None:
        self._carrier = carrier
        self._is_stopped = is_stopped
        self._incoming: CarrierIncoming | None = None

    def attach(self, blob: bytes) -> wire.Attached:
        """Have the carrier reach the sender, by what that said of its side."""
        self.close()
        try:
            self._incoming = self._carrier.incoming(blob)
        except CarrierError as e:
            return wire.Attached(refusal=str(e))
        return wire.Attached(self._incoming.blob)

    def try_out(self, probe: wire.CarrierProbe) -> str | None:
        """Bring the bytes of a probe; returns why it is not used, if it does not bring them."""
        try:
            slot = self.fetch(probe.place, len(probe.data), PROBE_SECONDS)
        except (CarrierError, TimeoutError) as e:
            self.close()
            return f"{self._carrier.kind} does not reach the sender: {e}"
        came = slot.memory.read(slot.start, len(probe.data))
        self.give_back(slot)
        if came == probe.data:
            return None
        self.close()
        return f"{self._carrier.kind} brought other bytes than the sender's"

    def fetch(self, place: int, num_bytes: int, seconds: float = FETCH_SECONDS) -> Slot:
        """A slot with these bytes, to be given back.  Raises CarrierError, TimeoutError."""
        if self._incoming is None:
            raise wire.WireError("a payload was announced by a carrier that was not attached")
        slot = self._carrier.receiving.take(SLOT_SECONDS)
        if slot is None:
            raise CarrierError("no slot is free")
        if num_bytes > slot.num_bytes:
            self.give_back(slot)
            raise wire.WireError(f"a payload of {num_bytes} bytes fits no slot")
        fetch: CarrierFetch | None = None
        try:
            fetch = self._incoming.fetch(place, num_bytes, slot)
            self._wait(fetch, seconds)
        except CarrierError:
            self.give_back(slot)
            raise
        except (TimeoutError, ConnectionAbortedError):
            if fetch is not None:
                self._carrier.receiving.lose(slot, fetch)
            raise
        return slot

    def give_back(self, slot: Slot) -> None:
        """After its bytes were copied, or dropped."""
        self._carrier.receiving.give_back(slot)

    def close(self) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.close()

    def _wait(self, fetch: CarrierFetch, seconds: float) -> None:
        """Look at growing distances: a carrier wakes no thread, and a frame takes about 1 ms.

        Raises TimeoutError, ConnectionAbortedError, CarrierError.
        """
        deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while not fetch.is_done():
            if self._is_stopped():
                raise ConnectionAbortedError("the KV port is closing")
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the carrier brought nothing in {seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
