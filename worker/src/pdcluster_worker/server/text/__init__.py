"""Tokens to text and back: tokenizer, chat template, and the parts of an answer."""
