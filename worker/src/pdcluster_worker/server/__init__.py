"""HTTP side of a worker: OpenAI's and Anthropic's APIs, tokenizing, streaming, health, metrics."""
