"""A stock engine, vLLM or SGLang, behind our engine messages: its server over HTTP on loopback."""
