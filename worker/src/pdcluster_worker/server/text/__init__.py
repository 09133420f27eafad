"""Tokens to text and back: tokenizer, chat template, stop strings, and the parts of an answer."""
