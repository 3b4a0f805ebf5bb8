"""Makes Triton's interpreter compute bf16 as a GPU does.

The interpreter keeps bf16 as uint16: `tl.dot` on bf16 multiplies raw codes, and a cast from fp32 truncates. Its fused
multiply-add rounds twice.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Replaces the interpreter's dot (operands widened to fp32), bf16 cast (round to nearest even) and fma (rounded once).

    Also lets loops run to a loaded bound under every numpy. Idempotent. `TRITON_INTERPRET=1` must have been set before any kernel was decorated.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_deepinfer_installed", False):
        return
    stock_cast, stock_fp_to_fp, handle = builder.cast_impl, builder.create_fp_to_fp, interpreter.TensorHandle

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if tl.bfloat16 not in (source, target) or source == target:
            return stock_cast(self, src, dst_type)
        wide = widen(src.data) if source == tl.bfloat16 else src.data
        if target == tl.bfloat16:
            return handle(narrow(wide), target)
        return handle(wide.astype(interpreter._get_np_dtype(target)), target)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return cast_impl(self, src, dst_type)
        return stock_fp_to_fp(self, src, dst_type, rounding_mode)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_options: Any) -> Any:
        import numpy as np

        kind = np.float32 if d.data.dtype.itemsize == 2 else d.data.dtype
        product = np.matmul(operand(a), operand(b), dtype=kind)
        return handle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar != tl.float32:
            return stock_fma(self, x, y, z)
        return handle(fused(x.data, y.data, z.data), z.dtype.scalar)

    def operand(value: Any) -> Any:
        scalar = value.dtype.scalar
        if scalar == tl.bfloat16:
            return widen(value.data)
        if scalar.primitive_bitwidth == 8 and scalar.is_floating():
            return interpreter._convert_float(value.data, scalar, tl.float32, None).view("float32")
        return value.data

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        stock_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    stock_patch, stock_fma = interpreter._patch_lang_tensor, builder.create_fma
    # Triton before 3.8 converts one-element arrays, which numpy 2.5 refuses
    interpreter._patch_lang_tensor = patch_lang_tensor
    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = create_fp_to_fp
    builder.create_dot = create_dot
    builder.create_fma = create_fma
    builder._deepinfer_installed = True


def fused(x: Any, y: Any, z: Any) -> Any:
    """x * y + z of float32 arrays, rounded once."""
    import numpy as np

    with np.errstate(all="ignore"):
        product, addend = np.multiply(x, y, dtype=np.float64), np.asarray(z, dtype=np.float64)
        total = product + addend
        back = total - product
        lost = (product - (total - back)) + (addend - back)
        # an odd last bit stands for what the sum lost: the second rounding then goes the way that one rounding would
        inexact = (lost != 0) & np.isfinite(lost) & (total.view(np.int64) & 1 == 0)
        sticky = np.nextafter(total, np.copysign(np.inf, lost))
        return np.where(inexact, sticky, total).astype(np.float32)


def widen(codes: Any) -> Any:
    """bf16 codes (uint16 array) as float32."""
    return (codes.astype("uint32") << 16).view("float32")


def narrow(values: Any) -> Any:
    """float array to bf16 codes (uint16), nearest even, NaN kept quiet; float64 is rounded to float32 first."""
    import numpy as np

    values = np.asarray(values, dtype=np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(values), quiet, rounded)
