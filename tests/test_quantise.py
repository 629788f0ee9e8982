"""Quantising to block-FP8, bit for bit, and values that are refused."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from helpers import slow_but
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_fp8 import BF16_GRID, BLOCK, E4M3, E4M3_GRID, FINITE, bf16, exact, reference_quantise

from dsv2mk.pipeline.quantise import first_e4m3_nan, place, quantise_band, to_bf16

UNTOUCHED = 0xAA


def quantise(values: np.ndarray, device: str = "cpu") -> tuple[np.ndarray, np.ndarray]:
    """A whole matrix, band by band."""
    rows, columns = values.shape
    wide = -(-columns // BLOCK)
    out = np.full((rows, columns), UNTOUCHED, np.uint8)
    scales = np.full((-(-rows // BLOCK), wide), np.nan, np.float32)
    for index, first in enumerate(range(0, rows, BLOCK)):
        bad = quantise_band(
            values[first : first + BLOCK],
            out[first : first + BLOCK].reshape(-1),
            scales[index],
            row_stride=columns,
            block_stride=BLOCK,
            device=device,
        )
        assert bad == -1
    return out, scales


def check(values: np.ndarray, device: str = "cpu") -> tuple[np.ndarray, np.ndarray]:
    """Quantise, compare with the reference bit for bit, and return bytes and scales."""
    out, scales = quantise(values, device)
    expected, expected_scales = reference_quantise(exact(values))
    assert np.array_equal(scales.astype(np.float64), expected_scales)
    assert np.array_equal(out, expected)
    assert not ((out & 0x7F) == 0x7F).any()
    return out, scales


# "cpu:0" is the CPU too, but by way of torch.
BOTH_PATHS = pytest.mark.parametrize("device", ["cpu", "cpu:0"])


def test_the_reference_grids_are_the_formats() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(E4M3, codes.view(torch.float8_e4m3fn).double().numpy(), equal_nan=True)
    assert [E4M3[1], E4M3[8], E4M3[0x38], E4M3[0x7E]] == [2.0**-9, 2.0**-6, 1.0, 448.0]
    assert len(BF16_GRID) == 0x7F81
    assert BF16_GRID[[1, 0x80, 0x3F80]].tolist() == [2.0**-133, 2.0**-126, 1.0]


@pytest.mark.parametrize("device", slow_but(["cpu", "cpu:0"], "cpu"))
def test_every_finite_bf16_alone_in_a_block(device: str) -> None:
    # One value a block, at a position that moves; and as the one value of an edge block.
    for values in np.array_split(FINITE, 32):
        band = np.zeros((1, len(values), BLOCK), np.uint16)
        band[0, np.arange(len(values)), np.arange(len(values)) % BLOCK] = values
        check(band.reshape(1, -1), device)
    for value in FINITE[::97]:
        check(np.full((1, 1), value), device)


@BOTH_PATHS
def test_every_finite_bf16_below_various_maxima(device: str) -> None:
    # Quotients of all kinds: normal, subnormal, ties, and down to nothing.
    for amax in (0x0001, 0x0060, 0x00C3, 0x0461, 0x3C00, 0x3FE0, 0x3FE1, 0x43E0, 0x7F60, 0x7F7F):
        values = FINITE[amax >= (FINITE & 0x7FFF)]
        blocks = -(-len(values) // (BLOCK - 1))
        band = np.full((blocks, BLOCK), amax, np.uint16)
        band[:, 1:].flat[: len(values)] = values
        check(band.reshape(1, -1), device)


@BOTH_PATHS
def test_every_exponent_of_amax(device: str) -> None:
    """Powers of two, both sides of 1.75 (where the scale doubles), and the largest mantissa."""
    rng = np.random.default_rng(1)
    mantissas = np.array([0x00, 0x01, 0x5F, 0x60, 0x61, 0x7F], np.uint16)
    amax = (np.arange(255, dtype=np.uint16)[:, None] << 7 | mantissas).reshape(-1)
    below = rng.integers(0, 1 << 16, (len(amax), 4, BLOCK), dtype=np.uint16)
    # Magnitudes within 20 binades of amax, signs at random.
    magnitude = np.maximum(amax[:, None, None].astype(int) - (below & 0x7FFF) % (20 << 7), 0)
    blocks = (magnitude | below & 0x8000).astype(np.uint16)
    blocks[:, 3, 100] = amax
    check(blocks.transpose(1, 0, 2).reshape(4, -1), device)


@BOTH_PATHS
@pytest.mark.parametrize("exponent", range(-126, 120, 5))
def test_scale_where_amax_is_448_times_a_power_of_two_and_just_above(
    device: str, exponent: int
) -> None:
    edge = bf16([[448 * 2.0**exponent]])
    out, scale = check(edge, device)
    assert (out.item(), scale.item()) == (0x7E, 2.0**exponent)
    out, scale = check(edge + np.uint16(1), device)
    assert (out.item(), scale.item()) == (0x76, 2.0 ** (exponent + 1))  # 225 rounds to 224
    above = np.nextafter(exact(edge).astype(np.float32), np.float32(np.inf))
    out, scale = check(above)
    assert (out.item(), scale.item()) == (0x76, 2.0 ** (exponent + 1))


@pytest.mark.parametrize(
    ("value", "scale", "byte"),
    [
        (0.0, 1.0, 0x00),
        (-0.0, 1.0, 0x80),
        (2.0**-133, 2.0**-126, 0x04),  # bf16's smallest: 2^-7 of the smallest scale
        (2.0**-126, 2.0**-126, 0x38),
        (1.75 * 2.0**-118, 2.0**-126, 0x7E),
        ((2 - 2.0**-7) * 2.0**127, 2.0**120, 0x78),  # bf16's largest: 255 rounds to 256
        (1.75 * 2.0**127, 2.0**119, 0x7E),
        (1.0, 2.0**-8, 0x78),
    ],
)
@BOTH_PATHS
def test_known_blocks(device: str, value: float, scale: float, byte: int) -> None:
    out, scales = check(bf16(np.full((130, 131), value)), device)
    assert set(out.flat) == {byte}
    assert set(scales.flat) == {scale}


@BOTH_PATHS
def test_tiny_blocks(device: str) -> None:
    tiny = torch.full((200, 200), 1e-37).bfloat16().view(torch.uint16).numpy()
    out, scales = check(tiny, device)
    deviation = E4M3[out] * scales[0, 0] / 1e-37
    assert abs(deviation - 1).max() < 1 / 16


@BOTH_PATHS
def test_a_single_one_among_zeros(device: str) -> None:
    values = np.zeros((256, 256), np.uint16)
    values[130, 5] = bf16(1.0)
    out, scales = check(values, device)
    assert scales.tolist() == [[1.0, 1.0], [2.0**-8, 1.0]]
    assert np.argwhere(out).tolist() == [[130, 5]]


@pytest.mark.parametrize(
    ("value", "byte"),
    [
        (1.0625, 0x38),  # between 1 and 1.125
        (1.1875, 0x3A),  # between 1.125 and 1.25
        (-1.0625, 0xB8),
        (1.9375, 0x40),  # between 1.875 and 2
        (2.0**-10, 0x00),  # between 0 and the smallest subnormal
        (-(2.0**-10), 0x80),
        (3 * 2.0**-10, 0x02),
        (2.0**-6 - 2.0**-10, 0x08),  # between the largest subnormal and the smallest normal
        (2.0**-6 + 2.0**-10, 0x08),
        (432.0, 0x7E),
        (400.0, 0x7C),
    ],
)
@BOTH_PATHS
def test_ties_go_to_the_even_code(device: str, value: float, byte: int) -> None:
    out, scales = check(bf16([[448.0, value]]), device)
    assert scales.item() == 1.0
    assert out.tolist() == [[0x7E, byte]]


def test_all_ties_at_all_scales() -> None:
    middles = (E4M3_GRID[:-1] + E4M3_GRID[1:]) / 2
    row = np.concatenate([[448.0], middles])  # 127 values: every tie of a block with scale 1
    for exponent in (-126, -120, -7, 0, 1, 119):
        values = row * 2.0**exponent
        signed = np.stack([values, -values])
        if exponent > -120:  # below, bf16 cannot hold the odd multiples of 2^-10
            check(bf16(signed))
        check(signed.astype(np.float32))


def test_fp32_is_not_rounded_twice() -> None:
    """Just past a tie: by way of bf16 it would be the tie itself, and go to the other side."""
    out, _ = check(np.array([[448, 1.0625 + 2.0**-20, 1.1875 - 2.0**-20]], np.float32))
    assert out.tolist() == [[0x7E, 0x39, 0x39]]
    out, _ = check(np.array([[448, 1.0625 + 2.0**-10]], np.float16))
    assert out.tolist() == [[0x7E, 0x39]]


def test_every_finite_fp16() -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    check(values[np.isfinite(values)].reshape(-1, 992))


@pytest.mark.parametrize("smallest", [1e-45, 1.1754942e-38, 3e-39])
def test_fp32_subnormals(smallest: float) -> None:
    """A block is zero only if every value is: the smallest fp32 has the smallest scale."""
    values = np.zeros((3, 200), np.float32)
    values[1, 150] = smallest
    _, scales = check(values)
    assert scales.tolist() == [[1.0, 2.0**-126]]


@pytest.mark.parametrize(
    "shape", [(1, 1), (576, 136), (127, 129), (129, 127), (128, 128), (5, 1408), (300, 85)]
)
@BOTH_PATHS
def test_edge_blocks(device: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(2)
    # Each block has its own magnitude, so that a value in the wrong block changes the scales.
    blocks = rng.integers(-60, 60, (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK)))
    sizes = 2.0 ** blocks.repeat(BLOCK, 0).repeat(BLOCK, 1)[: shape[0], : shape[1]]
    values = torch.from_numpy(rng.standard_normal(shape) * sizes)
    check(values.bfloat16().view(torch.uint16).numpy(), device)
    check(values.float().numpy(), device)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 130),
    columns=st.integers(1, 400),
    low=st.integers(0, 254),
    span=st.integers(0, 254),
    zeros=st.floats(0, 1),
    seed=st.integers(0, 1 << 32),
)
def test_both_paths_agree_on_random_bits(
    rows: int, columns: int, low: int, span: int, zeros: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    exponent = rng.integers(low, min(low + span, 254) + 1, (rows, columns)).astype(np.uint16)
    bits = rng.integers(0, 1 << 16, (rows, columns), dtype=np.uint16)
    bits = (bits & 0x807F) | exponent << 7
    bits[rng.random((rows, columns)) < zeros] &= 0x8000
    out, scales = check(bits)
    for again in (quantise(bits, "cpu:0"), quantise(exact(bits).astype(np.float32))):
        assert np.array_equal(again[0], out)
        assert np.array_equal(again[1], scales)


@settings(max_examples=40)
@given(
    rows=st.integers(1, 130),
    columns=st.integers(1, 300),
    dtype=st.sampled_from([np.float16, np.float32]),
    seed=st.integers(0, 1 << 32),
    spread=st.floats(0, 30),
)
def test_random_wide_values(rows: int, columns: int, dtype: type, seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    size = 2.0 ** rng.uniform(-spread, min(spread, 14), (rows, columns))
    check((rng.standard_normal((rows, columns)) * size).clip(-65504, 65504).astype(dtype))


# ---- values that are refused ----

SHAPES = [(1, 1), (3, 300), (128, 128), (100, 256), (128, 129)]


def positions(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Corners, both sides of every block edge, the middle."""
    for column in sorted({0, 127, 128, 255, 256, columns // 2, columns - 1}):
        if column < columns:
            for row in sorted({0, rows // 2, rows - 1}):
                yield row, column


@pytest.mark.parametrize("shape", SHAPES)
@BOTH_PATHS
def test_a_value_that_is_not_finite_is_found(device: str, shape: tuple[int, int]) -> None:
    band = np.resize(FINITE, shape)
    for row, column in positions(*shape):
        for bits in (0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF):  # both infinities, three NaNs
            bad = band.copy()
            bad[row, column] = bits
            out, scales = np.zeros(band.size, np.uint8), np.zeros(3, np.float32)
            where = quantise_band(
                bad, out, scales, row_stride=shape[1], block_stride=BLOCK, device=device
            )
            assert where == row * shape[1] + column
            assert to_bf16(bad)[1] == where


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_wide_value_that_is_not_finite_is_found(dtype: type) -> None:
    for shape in SHAPES:
        for row, column in positions(*shape):
            for value in (np.nan, np.inf, -np.inf):
                bad = np.ones(shape, dtype)
                bad[row, column] = value
                out, scales = np.zeros(bad.size, np.uint8), np.zeros(3, np.float32)
                where = quantise_band(bad, out, scales, row_stride=shape[1], block_stride=BLOCK)
                assert where == row * shape[1] + column
                assert to_bf16(bad)[1] == where


@BOTH_PATHS
def test_of_several_bad_values_one_is_named(device: str) -> None:
    band = np.zeros((4, 300), np.uint16)
    band[0, 299] = band[3, 2] = band[2, 140] = 0x7F80
    out, scales = np.zeros(band.size, np.uint8), np.zeros(3, np.float32)
    where = quantise_band(band, out, scales, row_stride=300, block_stride=BLOCK, device=device)
    assert where in (299, 902, 740)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("shape", SHAPES)
def test_first_e4m3_nan(byte: int, shape: tuple[int, int]) -> None:
    codes = np.arange(256, dtype=np.uint8)
    good = np.resize(codes[(codes & 0x7F) != 0x7F], shape)
    assert first_e4m3_nan(good) == -1
    for row, column in positions(*shape):
        bad = good.copy()
        bad[row, column] = byte
        assert first_e4m3_nan(bad) == row * shape[1] + column
        bad[row:, column:] = byte
        assert first_e4m3_nan(bad) == row * shape[1] + column


# ---- where the bytes go ----


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(rows, columns, row_stride, block_stride), no two bytes in one place."""
    rows, columns = draw(st.integers(1, 128)), draw(st.integers(1, 400))
    blocks, gap, more = -(-columns // BLOCK), draw(st.integers(0, 9)), draw(st.integers(0, 300))
    if draw(st.booleans()):  # a row's blocks lie together, as in gate and up
        block_stride = BLOCK + gap
        row_stride = blocks * block_stride + more
    else:  # a block's rows lie together, as in down
        row_stride = BLOCK + gap
        block_stride = rows * row_stride + more
    return rows, columns, row_stride, block_stride


@settings(max_examples=60)
@given(placements(), st.sampled_from(["bf16", "bf16 by torch", "fp32"]), st.integers(0, 1 << 32))
def test_bytes_go_where_the_strides_say_and_nowhere_else(
    placement: tuple[int, int, int, int], path: str, seed: int
) -> None:
    rows, columns, row_stride, block_stride = placement
    values = np.random.default_rng(seed).choice(FINITE, (rows, columns))
    codes, code_scales = reference_quantise(exact(values))
    i, j = np.indices((rows, columns))
    target = i * row_stride + j // BLOCK * block_stride + j % BLOCK
    expected = np.full(target.max() + 1 + seed % 5, UNTOUCHED, np.uint8)
    assert len(np.unique(target)) == target.size
    expected[target] = codes
    expected_scales = np.append(code_scales[0], np.float32(-1))

    out, scales = np.full_like(expected, UNTOUCHED), np.full_like(expected_scales, -1)
    bad = quantise_band(
        exact(values).astype(np.float32) if path == "fp32" else values,
        out,
        scales,
        row_stride=row_stride,
        block_stride=block_stride,
        device="cpu" if path != "bf16 by torch" else "cpu:0",
    )
    assert bad == -1
    assert np.array_equal(out, expected)
    assert np.array_equal(scales, expected_scales)

    out = np.full_like(expected, UNTOUCHED)
    place(codes, out, row_stride=row_stride, block_stride=block_stride)
    assert np.array_equal(out, expected)
