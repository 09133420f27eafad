"""Traces of load: files of rates or of single requests, read whole or refused.  No engine in it."""
