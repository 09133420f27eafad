"""OpenAI's chat and completions APIs: requests to prompts, deltas to their shapes."""
