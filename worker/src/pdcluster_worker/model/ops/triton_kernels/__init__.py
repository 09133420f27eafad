"""Triton kernels of the `cuda` operations; imported only with Triton."""

# a product is rounded before it is added, as the reference does
NO_FUSION = {"enable_fp_fusion": False}
