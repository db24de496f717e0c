"""Make Triton's interpreter compute bfloat16 as a GPU does; for tests only (Triton 3.6 to 3.9).

Upstream keeps bf16 as raw uint16: it truncates float32 -> bf16, and feeds bit patterns to products and sums (triton#11584).
Here bf16 is widened for arithmetic and rounded to nearest even on the way back.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def bits_of(values):
    """float32 -> bf16 bit patterns, rounded to nearest even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    with np.errstate(over="ignore"):
        rounded = ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def values_of(bits):
    """bf16 bit patterns -> float32."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def install():
    """Replace the four methods of the interpreter that touch bf16. A second call does nothing."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_bf16_fixed", False):
        return
    handle, bf16 = interpreter.TensorHandle, tl.bfloat16
    cast, binary, unary, dot = builder.cast_impl, builder.binary_op, builder.unary_op, builder.create_dot

    def widened(x):
        return handle(values_of(x.data), tl.float32) if x.dtype.scalar == bf16 else x

    def narrowed(x):
        return handle(bits_of(x.data), bf16)

    def cast_impl(self, src, dst):
        source, target = src.dtype.scalar, dst.scalar
        if source == bf16:
            return widened(src) if target == tl.float32 else src if target == bf16 else cast(self, widened(src), dst)
        if target == bf16:
            return narrowed(src if source == tl.float32 else cast(self, src, tl.float32))
        return cast(self, src, dst)

    def binary_op(self, a, b, op):
        if a.dtype.scalar != bf16 or b.dtype.scalar != bf16:
            return binary(self, a, b, op)
        result = binary(self, widened(a), widened(b), op)
        return result if result.data.dtype == np.bool_ else narrowed(result)

    def unary_op(self, a, op):
        return narrowed(unary(self, widened(a), op)) if a.dtype.scalar == bf16 else unary(self, a, op)

    def create_dot(self, a, b, d, *rest):
        return dot(self, widened(a), widened(b), d, *rest)

    for replacement in (cast_impl, binary_op, unary_op, create_dot):
        setattr(builder, replacement.__name__, replacement)
    builder._bf16_fixed = True
