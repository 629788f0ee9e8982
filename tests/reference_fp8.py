"""The formats in float64 arithmetic that knows only their definitions: E4M3, bf16, block scales."""

import numpy as np

BLOCK = 128


def e4m3_value(code: int) -> float:
    """E4M3 (OCP FP8, finite): 4 exponent bits of bias 7, 3 of mantissa, NaN where all 7 are set."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 0x80 else size


E4M3 = np.array([e4m3_value(code) for code in range(256)])
E4M3_GRID = E4M3[:0x7F]  # 0 to 448

# Every bf16 magnitude; the code of infinity stands for 2^128, whence values round to it.
BF16_GRID = np.append((np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32), 2.0**128)


def nearest_even(grid: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """Index of the nearest grid value; of two that are equally near, the even index."""
    middles = (grid[:-1] + grid[1:]) / 2  # exact: both grids have few mantissa bits
    code = np.searchsorted(middles, magnitudes, side="left")
    tie = (code < len(middles)) & (middles[np.minimum(code, len(middles) - 1)] == magnitudes)
    return code + (tie & (code % 2 == 1))


def block_scales(amax: np.ndarray) -> np.ndarray:
    """By exact search: the smallest power of two s >= 2^-126 with amax <= 448 s; 1 for zero."""
    scale = np.full(amax.shape, np.nan)
    for exponent in range(-126, 128):
        fits = np.isnan(scale) & (amax <= 448 * 2.0**exponent)
        scale[fits] = 2.0**exponent
    scale[amax == 0] = 1
    return scale


def reference_quantise(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bytes [rows, columns], scales [rows / 128, columns / 128], both up) of float64 values."""
    rows, columns = values.shape
    high, wide = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = np.zeros((high * BLOCK, wide * BLOCK))
    padded[:rows, :columns] = np.abs(values)
    scales = block_scales(padded.reshape(high, BLOCK, wide, BLOCK).max((1, 3)))
    spread = scales.repeat(BLOCK, 0).repeat(BLOCK, 1)[:rows, :columns]
    codes = nearest_even(E4M3_GRID, np.abs(values) / spread)  # a power of two: exact
    return (codes | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8), scales


def exact(values: np.ndarray) -> np.ndarray:
    """float64 of fp16, fp32, or of bf16's bits."""
    if values.dtype == np.uint16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


def bf16(values: object) -> np.ndarray:
    """Bits of values that bf16 holds exactly."""
    wide = np.asarray(values, np.float64)
    bits = (nearest_even(BF16_GRID, np.abs(wide)) | np.signbit(wide) * 0x8000).astype(np.uint16)
    assert np.array_equal(exact(bits), wide)
    return bits


def reference_bf16(values: np.ndarray) -> np.ndarray:
    """Bits of the nearest bf16 (ties to even) of float64 values that are no NaN."""
    codes = nearest_even(BF16_GRID, np.minimum(np.abs(values), 2.0**128))
    return (codes | np.signbit(values) * 0x8000).astype(np.uint16)


def reference_dequantise(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """E4M3 times an fp32 scale in fp32 (the true product, rounded once), then bf16."""
    spread = scales.astype(np.float64).repeat(BLOCK, 1)[:, : codes.shape[1]]
    product = E4M3[codes] * spread  # 4 by 24 bits: exact in float64
    return reference_bf16(product.astype(np.float32).astype(np.float64))


ALL_BITS = np.arange(1 << 16, dtype=np.uint16)
FINITE = ALL_BITS[(ALL_BITS & 0x7F80) != 0x7F80]
