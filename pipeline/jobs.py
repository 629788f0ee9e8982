"""The jobs of a build, and which bytes each of them writes.

A job is what one worker does without interruption: `embed`, one `layer`, or `head`.
"""

from collections.abc import Iterator

from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.layout import RankLayout, TensorSpec


def jobs(geometry: Geometry) -> list[str]:
    """Names of all jobs of a build, in the order in which they are started."""
    layers = [f"layer {layer}" for layer in range(geometry.num_hidden_layers)]
    return ["embed", *layers, "head"]


def job_extents(layout: RankLayout, spec: TensorSpec) -> Iterator[tuple[str, int, int]]:
    """(job, start, end) in the part's data, for each piece of a tensor that one job writes."""
    dense = layout.geometry.first_k_dense_replace
    if spec.axis == "other":
        yield "embed" if spec.name == "embed" else "head", spec.offset, spec.offset + spec.nbytes
        return
    for layer in range(layout.geometry.num_hidden_layers):
        first, last = {
            "layer": (layer, layer + 1),
            "moe_layer": (max(layer - dense, 0), max(layer - dense + 1, 0)),
            "unit": layout.unit_offsets[layer : layer + 2],
        }[spec.axis]
        if first < last:
            start = spec.offset + first * spec.stride
            yield f"layer {layer}", start, spec.offset + last * spec.stride
