"""Traces of requests: events of each, kept for `pdctl why`, and sent as OpenTelemetry spans."""
