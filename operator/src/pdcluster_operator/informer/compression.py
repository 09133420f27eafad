"""Bodies as compressed JSON, with the first few of each kind as zlib's dictionary: a later one
takes a fifth of the space. Secrets are no examples, since an example outlives its object.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdcluster_api.apiserver.kinds import Body
from pdcluster_schema.quick_json import decoded, encoded

# Examples of a kind: a PDCluster has up to four children of one, each of another form
NUM_EXAMPLES = 4

MAX_BYTES = 32_768  # Bytes of a dictionary that zlib looks at: its window

_LEVEL = 3
_NO_EXAMPLES = frozenset({"Secret"})


@dataclass(frozen=True, slots=True)
class CompressedBody:
    """One body.  examples: with which it was packed; num_bytes: as JSON"""

    content: bytes
    examples: bytes
    num_bytes: int

    def body(self) -> Body:
        decompressor = zlib.decompressobj(zdict=self.examples)
        body: Body = decoded(decompressor.decompress(self.content))
        return body


@dataclass
class Compressor:
    """Packs bodies.  _examples: of each kind, and their number"""

    _examples: dict[str, tuple[bytes, int]] = field(default_factory=dict)

    def compress(self, kind: str, body: Mapping[str, Any]) -> CompressedBody:
        text = encoded(body)
        examples, number = self._examples.get(kind, (b"", 0))
        compressor = zlib.compressobj(_LEVEL, zdict=examples)
        compressed = CompressedBody(
            compressor.compress(text) + compressor.flush(), examples, len(text)
        )
        if number < NUM_EXAMPLES and kind not in _NO_EXAMPLES:
            # the end of a dictionary is what is found at the least distance
            self._examples[kind] = (examples + text)[-MAX_BYTES:], number + 1
        return compressed
