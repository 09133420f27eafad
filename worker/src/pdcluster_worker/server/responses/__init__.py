"""OpenAI's Responses API: a thin layer over chat requests and the parts of their answers, and the
responses that are kept.
"""
