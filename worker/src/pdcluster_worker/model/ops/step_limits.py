"""The largest step that a device must be ready for."""

from dataclasses import dataclass

from pdcluster_worker.model.step_plan import padded_rows


@dataclass(frozen=True, slots=True)
class StepLimits:
    """max_tokens, max_sequences: of one batch.  longest: tokens of the longest context.
    block_size: of the cache.

    max_decode_rows: rows of decodes and their drafts, each of which is a sequence to the kernels; 0
                     = as many as sequences.
    """

    max_tokens: int
    max_sequences: int
    longest: int
    block_size: int
    max_decode_rows: int = 0

    @property
    def rows(self) -> int:
        """Rows of the largest step, padding included."""
        return padded_rows(max(self.max_tokens, self.max_sequences, self.max_decode_rows))

    @property
    def sequences(self) -> int:
        """Sequences of the largest padded step of decodes."""
        return padded_rows(max(self.max_sequences, self.max_decode_rows))

    @property
    def blocks(self) -> int:
        """Blocks of the longest context."""
        return -(-self.longest // self.block_size)
