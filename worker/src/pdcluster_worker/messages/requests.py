"""Requests and tokens as they travel: between server and engine process, and between workers."""

from collections.abc import Mapping
from typing import Literal

import msgspec

ConstraintKind = Literal[
    "json_schema", "json_object", "regex", "choice", "grammar", "structural_tag", "rendered"
]

CONSTRAINT_PARAM = "constraint"
"""Name in errors of the part of a request that an engine cannot compile."""

MAX_CONSTRAINT_CHARACTERS = 131_072
"""Longest text of a constraint; OpenAI's limit on the names and values of a schema is 120,000."""


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form that the text of an answer must have; each engine compiles it.

    text: a schema; nothing of json_object; an expression that the whole answer matches; a JSON list
    of strings; EBNF with the rule `root`; JSON of a structural tag; what a stock engine's front end
    says of it, for `stock_engine.generate_api` alone.
    """

    kind: ConstraintKind
    text: str = ""
    strict: bool = False  # a part of a schema that cannot be enforced is refused, not left out


IMAGE_URL = "data:image/"
"""Beginning of an image's URL: nothing is fetched."""

EPOCH_BYTES = 16
"""Length of an epoch: a 128-bit capability that names one transfer (docs/architecture.md)."""

SALT_BYTES = 32
"""Length of a salt of the prefix cache."""

FinishReason = Literal["stop", "length"]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The whole sampling state of a request, so any worker can continue it.

    The token at `position` (prompt and output together) is drawn from (seed, position) alone.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # None = off; n = the chosen token's and the n most likely ones'
    prompt_logprobs: int | None = None  # the same of the prompt's own tokens, on the first token
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    eos_token_ids: list[int] = []
    ignore_eos: bool = False
    constraint: Constraint | None = None

    def capped(self, max_tokens: int) -> "SamplingParams":
        return msgspec.structs.replace(
            self, max_tokens=max_tokens, min_tokens=min(self.min_tokens, max_tokens)
        )


class Image(msgspec.Struct, frozen=True):
    """An image of a prompt.  The engine's own hash of it, its `data:` URL, and the tokens in its
    place: one token, `length` times from `offset` on.
    """

    offset: int
    length: int
    digest: str
    url: str


UNDATED_SECONDS = 60.0
"""Deadline of a request that has none, for the order of waiting requests alone."""


class RequestSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request as it travels: prompt and output apart, so limits, penalties and usage go on
    unbroken when it moves.
    """

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    output: list[int] = []
    priority: int = 0  # lower goes first
    cache_salt: bytes = b""  # requests share cached blocks within one salt only; b"" = no salt
    ttft_slo_seconds: float | None = None  # that the client gave; None = that of the policy
    tpot_slo_seconds: float | None = None  # likewise
    deadline_seconds: float | None = None  # from now, until which it is to be complete
    group: str = ""  # of the requests that its worker defers together; "" = it is never deferred
    kv_holder: str = ""  # pod of the worker that it has just left, which still has its KV
    prefiller: str = ""  # host:port of the prefill worker that an endpoint picker has chosen
    verify_transfer: bool = False  # compare checksums of its KV, and report what arrived
    tenant: str = ""  # name of the API key that it came with; "" = none is asked for
    adapter: str = ""  # name of the LoRA adapter that computes it; "" = the model alone
    adapter_weights: str = ""  # their fingerprint; "" = of one of model.adapters
    images: list[Image] = []  # in their order, for a stock engine alone

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def runs_with(self, adapters: Mapping[str, str]) -> bool:
        """Return whether a worker with these has the very adapter that it names.

        adapters: fingerprints of those that were loaded while the worker runs, by name.
        """
        return not self.adapter_weights or adapters.get(self.adapter) == self.adapter_weights


class TransferTarget(msgspec.Struct, frozen=True):
    """The decode engine's blocks for KV writes under one epoch."""

    epoch: bytes
    engine_id: str
    addresses: list[str]  # of its KV ports, each for an even share of the KV heads, in their order
    cached_tokens: int  # a multiple of the block size
    block_ids: list[int]  # for the tokens from `cached_tokens` on, in order


class PromptLogprob(msgspec.Struct, frozen=True, array_like=True):
    logprob: float
    rank: int  # 1 = the most likely one
    top_logprobs: list[tuple[int, float]] = []


class TierRead(msgspec.Struct, frozen=True, omit_defaults=True):
    """The choice between reading a prompt's prefix from the tiers below the pool and computing it;
    seconds of both are expected ones, 0 = not measured yet.
    """

    choice: Literal["read", "lost", "compute"]  # lost: no block was whole, or still there
    tiers: str = ""  # that it was read from, the first block's first
    num_tokens: int = 0  # that arrived
    seconds: float = 0.0  # for which the request waited for them
    expected_seconds: float = 0.0
    compute_seconds: float = 0.0


class Token(msgspec.Struct, frozen=True, omit_defaults=True):
    request_id: str
    token_id: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it, if one did
    cached_tokens: int = 0  # prefix hit at admission, for usage
    # set on the first token that this engine made for the request
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    prompt_logprobs: list[PromptLogprob] = []  # from its second token on; on the first token
    tier_read: TierRead | None = None  # on the first token; None = no tier has any of its prefix

    def waited(self, seconds: float) -> "Token":
        """The same first token, of a request that was queued so much longer."""
        if seconds <= 0:
            return self
        return msgspec.structs.replace(self, queue_seconds=(self.queue_seconds or 0.0) + seconds)
