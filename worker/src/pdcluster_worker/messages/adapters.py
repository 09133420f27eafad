"""Messages of LoRA adapters that come and go while an engine runs; see `messages.engine`."""

import msgspec

# --- server -> engine -------------------------------------------------------------------------


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load a LoRA adapter beside the steps: `ResidentAdapters`, then `AdapterReply`.

    path: of its folder, as the engine sees it.
    """

    call: int
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Take an adapter from new requests: `ResidentAdapters` at once; `AdapterReply` when the last
    request that has it has ended.
    """

    call: int
    name: str


# --- engine -> server -------------------------------------------------------------------------


class AdapterReply(msgspec.Struct, frozen=True, tag=True):
    """End of a LoadAdapter or UnloadAdapter.  refused: the reason, with what follows; "" = done."""

    call: int
    weights: str = ""  # fingerprint of what was loaded
    num_bytes: int = 0  # that it takes
    free_bytes: int = 0  # that are left for others
    refused: str = ""
    status: int = 400
    code: str | None = None
    param: str | None = None


class ResidentAdapters(msgspec.Struct, frozen=True, tag=True):
    """All adapters that were loaded while the engine runs, and take requests: fingerprints of their
    weights, by name.
    """

    adapters: dict[str, str]
