"""The numerics at rest: which tensors are block-FP8, which bf16, and how a block is scaled.

One scheme exists. A second one would be a second value of `SCHEME["name"]`, and a manifest that
names a scheme this program does not know is refused.
"""

#: Edge of a square block that shares one scale, and the width of a unit.
BLOCK = 128
#: Largest E4M3 magnitude.
E4M3_MAX = 448.0
#: Exponent of the smallest block scale: fp32's smallest normal number.
MIN_SCALE_EXPONENT = -126

#: As it stands in the manifest.
SCHEME: dict[str, object] = {
    "name": "e4m3-block128",
    "ffn": "F8_E4M3",
    "rest": "BF16",
    "block": [BLOCK, BLOCK],
    "scale": "F32, smallest power of two s >= 2^-126 with amax <= 448 s; 1 for a zero block; "
    "as given for block-FP8 input",
}
