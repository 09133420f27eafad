"""Tiers below the block pool: host memory and local disk, and the threads that copy to them."""
