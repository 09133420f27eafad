"""Outcome of a verification of KV transfers, as `POST /verify` answers it (docs/contracts.md)."""

from typing import Literal

import msgspec

Outcome = Literal["verified", "failed", "postponed"]
"""postponed: nothing was sent, since the workers have other work or are about to go."""

Fault = Literal[
    "pair_refused", "not_connected", "transfer_failed", "damaged", "not_used", "tokens_differ"
]
"""Fault of a verification that failed.

pair_refused:    a worker of the prefill pool and this one do not match.
not_connected:   no worker of the prefill pool can be reached from here.
transfer_failed: the prefill or the transfer ended with an error, or took too long.
damaged:         the checksums of the blocks differ.
not_used:        the engine here took none of the KV, and computed the prompt again.
tokens_differ:   the tokens are others than those of a local prefill.
"""


class VerificationResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One verification, by a decode worker.

    fault, message:       of one that failed; message alone of one that is postponed.
    decode, prefill:      its pods.
    transport:            that moved the KV.
    num_prompt_tokens:    of the prompt whose KV moved; num_tokens: tokens that were compared.
    num_bytes:            that arrived; 0 = the engine does not know.
    bytes_per_second:     0 = not measured.
    has_checksum:         both engines have summed up the blocks, and agree.
    """

    outcome: Outcome
    decode: str
    prefill: str = ""
    fault: Fault | None = None
    message: str = ""
    transport: str = ""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    bytes_per_second: int = 0
    has_checksum: bool = False
