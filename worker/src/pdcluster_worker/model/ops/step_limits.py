"""The largest step that a device must be ready for."""

from dataclasses import dataclass

from pdcluster_worker.model.step_plan import padded_rows


@dataclass(frozen=True, slots=True)
class StepLimits:
    max_tokens: int
    max_sequences: int
    longest: int  # tokens of the longest context
    block_size: int
    max_decode_rows: int = 0  # with drafts, each a sequence to the kernels; 0 = max_sequences

    @property
    def rows(self) -> int:
        """Rows of the largest step, padded."""
        return padded_rows(max(self.max_tokens, self.max_sequences, self.max_decode_rows))

    @property
    def sequences(self) -> int:
        """Sequences of the largest decode step, padded."""
        return padded_rows(max(self.max_sequences, self.max_decode_rows))

    @property
    def blocks(self) -> int:
        return -(-self.longest // self.block_size)
