from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.kv_transfer.sharded import ShardChecksum, combined, head_crcs

NUM_HEADS = 4
BLOCKS = st.lists(
    st.binary(min_size=NUM_HEADS, max_size=16 * NUM_HEADS).map(lambda block: block * NUM_HEADS),
    min_size=1,
    max_size=8,
)


def of_heads(blocks, heads):
    """The checksum of these heads of blocks of NUM_HEADS heads."""
    checksum = ShardChecksum(heads)
    for block in blocks:
        size = len(block) // NUM_HEADS
        checksum.extend([head_crcs(block[heads.start * size : heads.stop * size], len(heads))])
    return checksum.value


def whole(blocks):
    return of_heads(blocks, range(NUM_HEADS))


@given(BLOCKS, st.integers(0, 8))
def test_checksum_is_the_same_however_the_blocks_are_grouped(blocks, cut):
    checksum = ShardChecksum(range(NUM_HEADS))
    for part in (blocks[:cut], blocks[cut:]):
        checksum.extend(head_crcs(block, NUM_HEADS) for block in part)
    assert checksum.value == whole(blocks)
    assert 0 <= whole(blocks) < 2**64


@given(BLOCKS, st.lists(st.integers(1, NUM_HEADS - 1), unique=True))
def test_checksum_is_the_same_however_ranks_share_the_heads(blocks, cuts):
    ends = [0, *sorted(cuts), NUM_HEADS]
    slices = [range(first, end) for first, end in pairwise(ends)]
    assert combined(of_heads(blocks, heads) for heads in slices) == whole(blocks)


@given(BLOCKS, st.integers(0, 10**6), st.integers(0, 7))
def test_checksum_sees_one_flipped_bit(blocks, position, bit):
    index = position % len(blocks)
    damaged = bytearray(blocks[index])
    damaged[position % len(damaged)] ^= 1 << bit
    assert whole([*blocks[:index], bytes(damaged), *blocks[index + 1 :]]) != whole(blocks)


def test_checksum_depends_on_the_order_of_blocks_and_heads():
    assert whole([b"aabbccdd", b"11223344"]) != whole([b"11223344", b"aabbccdd"])
    assert whole([b"aabbccdd"]) != whole([b"bbaaccdd"])


def test_combined_checksum_needs_every_slice():
    assert combined([1, None]) is None
    assert combined([2**64 - 1, 2]) == 1
