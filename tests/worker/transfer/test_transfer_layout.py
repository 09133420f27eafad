from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.transfer.layout import CHECKSUM_START, block_crc, extend_checksum

BLOCKS = st.lists(st.binary(min_size=1, max_size=64), min_size=1, max_size=8)


def checksum(blocks):
    return extend_checksum(CHECKSUM_START, map(block_crc, blocks))


@given(BLOCKS, st.integers(0, 8))
def test_checksum_is_the_same_however_the_blocks_are_grouped(blocks, cut):
    first = checksum(blocks[:cut])
    assert extend_checksum(first, map(block_crc, blocks[cut:])) == checksum(blocks)
    assert 0 <= checksum(blocks) < 2**64


@given(BLOCKS, st.integers(0, 10**6), st.integers(0, 7))
def test_checksum_sees_one_flipped_bit(blocks, position, bit):
    index = position % len(blocks)
    damaged = bytearray(blocks[index])
    damaged[position % len(damaged)] ^= 1 << bit
    assert checksum([*blocks[:index], bytes(damaged), *blocks[index + 1 :]]) != checksum(blocks)


def test_checksum_depends_on_the_order_of_the_blocks():
    assert checksum([b"a", b"b"]) != checksum([b"b", b"a"])
