"""Triton kernels of the `cuda` operations; only what launches them imports Triton too."""

NO_FUSION = {"enable_fp_fusion": False}
"""An option of a launch: a product is rounded before it is added, as the reference does."""
