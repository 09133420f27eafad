"""OpenAI's HTTP API: schemas, tokenizing, streaming, health, metrics."""
