"""The only package that imports torch: model loading, KV cache, decoder, sampling."""
