"""Triton kernels of the `cuda` operations; nothing else imports Triton."""
