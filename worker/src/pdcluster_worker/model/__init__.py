"""The only room with torch: loading, the paged KV cache, a decoder over a table of operations,
sampling.
"""
