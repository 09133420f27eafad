"""OpenAI's Responses API over chat requests, and the responses that are kept."""
