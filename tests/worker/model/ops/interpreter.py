"""Additions to Triton's interpreter: numpy has no bfloat16, and its dot multiplies the bits as if
they were integers.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder


def widen_dots() -> None:
    """Make dots of bfloat16 those of the same numbers in float32, as tensor cores sum them."""
    as_it_is = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return as_it_is(self, _wide(a), _wide(b), *rest)

    InterpreterBuilder.create_dot = create_dot


def _wide(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return type(handle)((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
