"""Hashes of blocks, as every worker of a revision computes them."""

from pdcluster_worker.messages.block_hash import block_hashes


def test_chains_of_two_salts_share_no_block():
    tokens = list(range(8))
    chains = [block_hashes(tokens, 4, salt) for salt in (b"", b"a" * 32, b"b" * 32)]
    assert chains[1] == block_hashes(tokens, 4, b"a" * 32)
    assert len({block_hash for chain in chains for block_hash in chain}) == 6
