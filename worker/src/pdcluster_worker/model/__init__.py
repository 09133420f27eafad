"""The only room with torch: loading, the paged KV cache, attention, sampling."""
