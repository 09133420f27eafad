"""A stock engine behind the messages of our own: a vLLM server over HTTP on loopback."""
