"""Relaying: a router hands the bytes of plain requests to workers' HTTP ports, and theirs back."""
