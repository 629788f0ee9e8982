"""Stored tensors as torch tensors, and statistics of their values."""

import warnings

import torch

from dsv2mk.manifests.layout import TensorSpec

_DTYPES = {
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F32": torch.float32,
    "I32": torch.int32,
}

#: Elements converted to float64 at a time.
_PIECE = 1 << 22


def as_torch(data: memoryview, spec: TensorSpec) -> torch.Tensor:
    """A mapped tensor as a torch tensor of its dtype and shape. No copy: never write to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=_DTYPES[spec.dtype]).view(spec.shape)


def statistics(data: memoryview, spec: TensorSpec) -> dict[str, float | int]:
    """Minimum, maximum, mean, root mean square, and counts of zeros and of NaN or infinity.

    Of the stored values: those of an E4M3 tensor are before their scale.
    """
    low, high, total, squares = float("inf"), float("-inf"), 0.0, 0.0
    zeros = bad = count = 0
    for piece in torch.split(as_torch(data, spec).reshape(-1), _PIECE):
        values = piece.float().double()
        finite = values[values.isfinite()]
        bad += len(values) - len(finite)
        zeros += int((finite == 0).sum())
        count += len(finite)
        if len(finite):
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            total += float(finite.sum())
            squares += float((finite * finite).sum())
    n = max(count, 1)
    return {
        "min": low if count else 0.0,
        "max": high if count else 0.0,
        "mean": total / n,
        "rms": (squares / n) ** 0.5,
        "zeros": zeros,
        "not_finite": bad,
    }
