"""Rounding to bf16, and dequantising FP8 to it."""

import numpy as np
import torch
from reference_fp8 import E4M3_GRID, FINITE, exact, reference_bf16, reference_dequantise

from dsv2mk.pipeline.quantise import dequantise_to_bf16, to_bf16

# ---- rounding ----


def test_to_bf16_leaves_bf16_alone() -> None:
    assert np.array_equal(to_bf16(FINITE)[0], FINITE)
    assert to_bf16(FINITE)[1] == -1


def test_to_bf16_of_every_fp16() -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values)].reshape(62, -1)
    bits, bad = to_bf16(values)
    assert bad == -1
    assert np.array_equal(bits, reference_bf16(exact(values)))
    assert np.array_equal(bits, torch.from_numpy(values).bfloat16().view(torch.uint16).numpy())


def test_to_bf16_of_fp32() -> None:
    """For every finite bf16: itself, the tie above it and the fp32 values on both sides of both."""
    base = FINITE.astype(np.uint32) << 16
    offsets = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits32 = base[:, None] + offsets
    overflows = (FINITE[:, None] & 0x7FFF == 0x7F7F) & (offsets >= 0x8000)
    values = bits32.view(np.float32)
    kept = values[~overflows]
    bits, bad = to_bf16(kept)
    assert bad == -1
    assert np.array_equal(bits, reference_bf16(exact(kept)))
    assert overflows.sum() == 6
    for value in values[overflows]:  # finite in fp32, infinite in bf16
        row = np.zeros((2, 200), np.float32)
        row[1, 131] = value
        bits, bad = to_bf16(row)
        assert bad == 331
        assert bits[1, 131] == reference_bf16(exact(value))


# ---- dequantising ----


def test_dequantise_every_byte() -> None:
    """Every byte under scales of all sizes, no powers of two, in whole and in edge blocks."""
    rng = np.random.default_rng(3)
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    values = np.stack([rng.permutation(np.resize(codes, 300)) for _ in range(200)])
    scales = (rng.uniform(1, 2, (200, 3)) * 2.0 ** rng.integers(-148, 118, (200, 3))).astype("f4")
    scales[0] = [1.0, 0.0, 2.0**-126]
    bits, bad = dequantise_to_bf16(values, scales)
    assert bad == -1
    assert np.array_equal(bits, reference_dequantise(values, scales))


def test_dequantise_with_powers_of_two_loses_nothing() -> None:
    codes = np.arange(0x7F, dtype=np.uint8)[None]
    bits, _ = dequantise_to_bf16(codes, np.array([[2.0**-20]], np.float32))
    assert np.array_equal(exact(bits)[0], E4M3_GRID * 2.0**-20)


def test_dequantise_names_what_overflows() -> None:
    values = np.zeros((3, 300), np.uint8)
    values[2, 290] = 0x7E
    scales = np.ones((3, 3), np.float32)
    scales[2, 2] = 1e36  # 4.48e38 is past bf16
    assert dequantise_to_bf16(values, scales)[1] == 890
    scales[2, 2] = 1e35
    assert dequantise_to_bf16(values, scales)[1] == -1
    values[1, 128] = 0x7F
    assert dequantise_to_bf16(values, scales)[1] == 428
