"""Block quantisation to E4M3, and conversion of everything else to bf16.

A block's scale is the smallest power of two s >= 2^-126 with amax <= 448 s, so dividing by it only
shifts exponents and the quotient never passes +-448: nothing is left to clamp, and the bytes do
not depend on what a library does past the range. Rounding is to nearest, ties to even.

Two implementations give the same bytes: machine code for bf16 on a CPU (numba), which works in the
cache on the bits themselves, and torch for other dtypes and for CUDA.
"""

from typing import Any

import numpy as np
import torch
from numba import njit

from dsv2mk.manifests.scheme import BLOCK, MIN_SCALE_EXPONENT
from dsv2mk.pipeline.reader import Array

_U32 = np.uint32
_F32_ONE = 127 << 23  # bits of 1.0; a power of two 2^k is k << 23 away
_E4M3_NORMAL = (127 - 6) << 23  # bits of 2^-6, E4M3's smallest normal number
_SUBNORMAL_SHIFT = np.float32(2.0**14)  # a float here has steps of 2^-9, as E4M3's subnormals
_ROUND_BITS = 20  # fp32 has 20 more mantissa bits than E4M3
_BIAS_DIFFERENCE = (127 - 7) << 3


def quantise_band(
    band: Array,
    out: Array,
    scales: Array,
    *,
    row_stride: int,
    block_stride: int,
    device: str = "cpu",
) -> int:
    """Quantise up to 128 rows, one row of blocks.

    `band` is [rows, columns]: bf16 as its bits (uint16), fp16 or fp32; `out` and `scales` are flat
    views that start where the band's first value and first scale belong. Row i, column j of block
    b goes to out[i * row_stride + b * block_stride + j], its scale (fp32) to scales[b]. Columns
    past the last whole block form a narrower block.

    Returns -1, or the flat index in `band` of a value that is NaN or infinite.
    """
    if band.dtype == np.uint16 and device == "cpu":
        strides = (row_stride, block_stride)
        return int(_quantise_bf16(band, out, scales, *strides, BLOCK, MIN_SCALE_EXPONENT))
    rows, columns = band.shape
    values = _as_torch(band).to(device).float()
    bad = ~values.isfinite()
    if bad.any():
        return int(bad.flatten().nonzero()[0])
    padded = torch.nn.functional.pad(values, (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    bits = padded.abs().amax((0, 2)).view(torch.int32)
    exponent = (bits >> 23) - (127 + 8) + ((bits & 0x7FFFFF) > 0x600000).int()
    exponent = torch.where(bits == 0, 0, exponent.clamp(min=MIN_SCALE_EXPONENT))
    inverse = (_F32_ONE - (exponent << 23)).view(torch.float32)
    quotient = (padded * inverse[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    scale = (_F32_ONE + (exponent << 23)).view(torch.float32)
    scales[: len(scale)] = scale.cpu().numpy()
    flat = quotient.reshape(rows, -1)[:, :columns].cpu().numpy()
    place(flat, out, row_stride=row_stride, block_stride=block_stride)
    return -1


def place(values: Array, out: Array, *, row_stride: int, block_stride: int) -> None:
    """Copy bytes [rows, columns] to where `quantise_band` would put them."""
    rows, columns = values.shape
    whole = columns // BLOCK
    strides = (row_stride, block_stride, 1)
    window = np.lib.stride_tricks.as_strided(out, (rows, whole, BLOCK), strides)
    window[:] = values[:, : whole * BLOCK].reshape(rows, whole, BLOCK)
    if rest := columns - whole * BLOCK:
        tail = out[whole * block_stride :]
        np.lib.stride_tricks.as_strided(tail, (rows, rest), (row_stride, 1))[:] = values[
            :, whole * BLOCK :
        ]


def first_e4m3_nan(values: Array) -> int:
    """Flat index of the first NaN byte (0x7F or 0xFF), or -1."""
    bad = (values & 0x7F) == 0x7F
    return int(bad.argmax()) if bad.any() else -1


def to_bf16(values: Array) -> tuple[Array, int]:
    """Bits of bf16 (uint16), rounded to nearest even from fp16 or fp32, as they are from bf16.

    Also the flat index of a value that is NaN or infinite, or becomes so, or -1.
    """
    if values.dtype != np.uint16:
        values = _as_torch(values).to(torch.bfloat16).view(torch.uint16).numpy()
    return values, int(_first_not_finite(values.reshape(-1)))


def dequantise_to_bf16(values: Array, scales: Array) -> tuple[Array, int]:
    """bf16 bits of E4M3 bytes [rows, columns] times fp32 scales [rows, columns / 128, up].

    The product is exact in fp32 up to its rounding, and is then rounded to bf16.
    """
    columns = values.shape[1]
    wide = torch.from_numpy(scales).repeat_interleave(BLOCK, 1)[:, :columns]
    product = torch.from_numpy(values).view(torch.float8_e4m3fn).float() * wide
    return to_bf16(product.numpy())


def _as_torch(values: Array) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if values.dtype == np.uint16 else tensor


def _compiled(function: Any) -> Any:
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # no folder that numba could keep the machine code in
        return njit(nogil=True, error_model="numpy")(function)


# Every intermediate is cast to its width again: numba widens integers to 64 bits, and only 16- and
# 32-bit arithmetic fills the vector registers. The scheme's numbers come as arguments, since what
# numba keeps on disk does not notice when another module's constant changes.


@_compiled
def _quantise_bf16(
    band: Array,
    out: Array,
    scales: Array,
    row_stride: int,
    block_stride: int,
    block_width: int,
    min_exponent: int,
) -> Any:
    rows, columns = band.shape
    bits = np.empty(block_width, np.uint32)
    value = bits.view(np.float32)
    shifted_bits = np.empty(block_width, np.uint32)
    shifted = shifted_bits.view(np.float32)
    power_bits = np.empty(2, np.uint32)
    power = power_bits.view(np.float32)
    # Row by row first, in the order of memory; the second pass finds the band in the cache.
    column_max = np.zeros(columns, np.uint16)
    for i in range(rows):
        row = band[i]
        for j in range(columns):
            magnitude = np.uint16(row[j] & np.uint16(0x7FFF))
            column_max[j] = magnitude if magnitude > column_max[j] else column_max[j]
    for block in range((columns + block_width - 1) // block_width):
        start = block * block_width
        width = min(block_width, columns - start)
        amax = np.int64(column_max[start : start + width].max())
        if amax >= 0x7F80:
            for i in range(rows):
                for j in range(width):
                    if (band[i, start + j] & 0x7F80) == 0x7F80:
                        return np.int64(i * columns + start + j)
        exponent = np.int64(0)
        if amax != 0:
            exponent = (amax >> 7) - (127 + 8) + np.int64((amax & 0x7F) > 0x60)
            exponent = max(exponent, np.int64(min_exponent))
        power_bits[0] = _F32_ONE - (exponent << 23)
        power_bits[1] = _F32_ONE + (exponent << 23)
        inverse = power[0]
        scales[block] = power[1]
        for i in range(rows):
            row = band[i, start : start + width]
            first = i * row_stride + block * block_stride
            target = out[first : first + width]
            for j in range(width):
                bits[j] = _U32(_U32(row[j] & np.uint16(0x7FFF)) << _U32(16))
            for j in range(width):
                value[j] = value[j] * inverse
                shifted[j] = value[j] + _SUBNORMAL_SHIFT
            for j in range(width):
                odd = _U32(_U32(bits[j] >> _U32(_ROUND_BITS)) & _U32(1))
                half = _U32((1 << (_ROUND_BITS - 1)) - 1)
                rounded = _U32(_U32(_U32(bits[j] + half) + odd) >> _U32(_ROUND_BITS))
                normal = _U32(rounded - _U32(_BIAS_DIFFERENCE))
                subnormal = _U32(shifted_bits[j] & _U32(0xFF))
                code = normal if bits[j] >= _U32(_E4M3_NORMAL) else subnormal
                sign = _U32(_U32(_U32(row[j]) >> _U32(8)) & _U32(0x80))
                target[j] = np.uint8(_U32(code | sign))
    return np.int64(-1)


@_compiled
def _first_not_finite(values: Array) -> Any:
    lanes = np.zeros(128, np.uint16)
    whole = len(values) // 128 * 128
    for start in range(0, whole, 128):
        piece = values[start : start + 128]
        for j in range(128):
            magnitude = np.uint16(piece[j] & np.uint16(0x7FFF))
            lanes[j] = magnitude if magnitude > lanes[j] else lanes[j]
    # The search itself is slow, and runs over the rest that fills no lanes, or when it will find.
    for i in range(whole if lanes.max() < 0x7F80 else 0, len(values)):
        if (values[i] & 0x7F80) == 0x7F80:
            return np.int64(i)
    return np.int64(-1)
