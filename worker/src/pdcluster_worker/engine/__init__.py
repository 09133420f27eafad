"""The pure engine: requests, blocks, scheduling; no torch, no sockets, no clock of its own."""
