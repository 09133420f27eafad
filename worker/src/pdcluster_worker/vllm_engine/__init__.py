"""Adapter between our engine messages and a vLLM server over HTTP on loopback."""
