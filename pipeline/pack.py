"""From checkpoint tensors to the bytes of every rank's shard.

What a job writes, and where, follows from the layout alone (see jobs.py), so that jobs can run in
any order and side by side.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from dsv2mk.manifests.checkpoint import EMBED, FINAL_NORM, LM_HEAD, layer_prefix, scale_name
from dsv2mk.manifests.geometry import units_of
from dsv2mk.manifests.layout import RankLayout
from dsv2mk.manifests.scheme import BLOCK, E4M3_MAX
from dsv2mk.pipeline.quantise import (
    dequantise_to_bf16,
    first_e4m3_nan,
    place,
    quantise_band,
    to_bf16,
)
from dsv2mk.pipeline.reader import Array, BadInput, Reader, SourceTensor, band_rows, damaged
from dsv2mk.pipeline.snapshot import Snapshot

#: The largest scale whose largest product is still finite in fp32.
_MAX_SCALE = np.float32(np.finfo(np.float32).max / E4M3_MAX)


class Sink(Protocol):
    """Takes the bytes of the shards."""

    def write(self, rank: int, part: str, offset: int, data: memoryview) -> None:
        """Put bytes at an offset of a part's data. The replicated part is rank 0's."""


class Packer:
    """Runs jobs: reads with one Reader, writes to one Sink. One thread at a time."""

    def __init__(
        self,
        snapshot: Snapshot,
        layouts: list[RankLayout],
        reader: Reader,
        sink: Sink,
        device: str = "cpu",
    ) -> None:
        self._snapshot = snapshot
        self._geometry = snapshot.geometry
        self._topology = layouts[0].topology
        self._layouts = layouts
        self._reader = reader
        self._sink = sink
        self._device = device
        self._buffers: dict[str, Array] = {}

    def run(self, job: str) -> None:
        """Read, convert and write all that a job owns. Raises BadInput for bad values."""
        kind, _, number = job.partition(" ")
        if kind == "embed":
            self._rows(EMBED, "embed")
        elif kind == "head":
            self._head()
        else:
            self._attention(int(number))
            self._feed_forward(int(number))

    # ---- bf16 ----

    def _head(self) -> None:
        self._rows(FINAL_NORM, "final_norm")
        tied = self._geometry.tie_word_embeddings
        vocab_rows = self._topology.vocab_rows(self._geometry)
        self._rows(EMBED if tied else LM_HEAD, "lm_head", rank_rows=vocab_rows)
        if tied and LM_HEAD in self._snapshot.tensors:
            self._check_tied()
        for layout in self._layouts:
            offsets = np.array(layout.unit_offsets, np.int32)
            self._write(layout.rank, "ffn_unit_offset", 0, offsets)

    def _check_tied(self) -> None:
        a, b = self._snapshot.tensors[EMBED], self._snapshot.tensors[LM_HEAD]
        rows = band_rows(a)
        pairs = zip(self._bf16(a, rows, "a"), self._bf16(b, rows, "b"), strict=True)
        for (start, embed), (_, head) in pairs:
            if not np.array_equal(embed, head):
                row = start + int((embed != head).any(1).argmax())
                raise BadInput(
                    f"{b.path}: {LM_HEAD} differs from {EMBED} in row {row}, though config.json "
                    "ties them (tie_word_embeddings true)",
                    fix="Remove one of the two statements",
                )

    def _rows(self, name: str, target: str, start: int = 0, rank_rows: int | None = None) -> None:
        """Copy a tensor's rows as bf16 to `target`, `start` bytes in.

        With `rank_rows`, each rank in turn takes that many rows; else the tensor is replicated.
        """
        source = self._snapshot.tensors[name]
        rank_rows = rank_rows or source.shape[0]
        for first, band in self._bf16(source, band_rows(source)):
            at = 0
            while at < len(band):
                rank, within = divmod(first + at, rank_rows)
                piece = band[at : at + rank_rows - within]
                row_bytes = piece.shape[1] * 2
                self._write(rank, target, start + within * row_bytes, piece)
                at += len(piece)

    def _attention(self, layer: int) -> None:
        g, prefix = self._geometry, layer_prefix(layer)
        heads = self._topology.heads(g)
        specs = self._layouts[0].tensors

        def here(target: str) -> int:
            return layer * specs[target].stride

        def rows(name: str, target: str, start: int = 0, rank_rows: int | None = None) -> None:
            self._rows(f"{prefix}{name}.weight", target, here(target) + start, rank_rows)

        rows("input_layernorm", "attn_norm")
        rows("post_attention_layernorm", "ffn_norm")
        rows("self_attn.kv_a_layernorm", "kv_a_norm")
        q_lora_bytes = 0
        if g.q_lora_rank is not None:
            rows("self_attn.q_a_layernorm", "q_a_norm")
            rows("self_attn.q_a_proj", "qkv_a")
            q_lora_bytes = g.q_lora_rank * g.hidden_size * 2
        rows("self_attn.kv_a_proj_with_mqa", "qkv_a", q_lora_bytes)
        q_b = "self_attn.q_proj" if g.q_lora_rank is None else "self_attn.q_b_proj"
        rows(q_b, "q_b", rank_rows=heads * g.qk_head_dim)

        kv_b = self._snapshot.tensors[f"{prefix}self_attn.kv_b_proj.weight"]
        per_head = g.qk_nope_head_dim + g.v_head_dim
        for first, band in self._bf16(kv_b, per_head):
            rank, head = divmod(first // per_head, heads)
            uk = np.ascontiguousarray(band[: g.qk_nope_head_dim].T)
            uv = band[g.qk_nope_head_dim :]
            self._write(rank, "w_uk", here("w_uk") + head * uk.nbytes, uk)
            self._write(rank, "w_uv", here("w_uv") + head * uv.nbytes, uv)

        o = self._snapshot.tensors[f"{prefix}self_attn.o_proj.weight"]
        width = heads * g.v_head_dim
        for first, band in self._bf16(o, band_rows(o)):
            for rank in range(self._topology.ranks):
                piece = np.ascontiguousarray(band[:, rank * width : (rank + 1) * width])
                self._write(rank, "o", here("o") + first * width * 2, piece)

    def _bf16(
        self, source: SourceTensor, rows: int, buffer: str = "a"
    ) -> Iterator[tuple[int, Array]]:
        """(first row, bits [rows, columns]) of successive bands, whatever the stored dtype."""
        scales = None
        if source.dtype == "F8_E4M3":
            scales = self._scales(source)
        first = 0
        for band in self._reader.bands(source, rows, buffer):
            if scales is None:
                bits, bad = to_bf16(band)
            else:
                self._refuse_nan(source, band, first)
                block_rows = np.arange(first, first + len(band)) // BLOCK
                bits, bad = dequantise_to_bf16(band, scales[block_rows])
            if bad >= 0:
                row, column = divmod(bad, band.shape[1])
                raise _not_finite(source, first + row, column, band[row, column])
            yield first, bits
            first += len(band)

    # ---- units ----

    def _feed_forward(self, layer: int) -> None:
        g, prefix = self._geometry, f"{layer_prefix(layer)}mlp."
        units = g.layer_units(layer)
        blocks = -(-g.hidden_size // BLOCK)
        gate_up_scale = np.ones((units, 2, blocks), np.float32)
        down_scale = np.ones((units, blocks), np.float32)
        if g.is_dense(layer):
            self._ffn(layer, prefix, 0, gate_up_scale, down_scale)
        else:
            router_layer = layer - g.first_k_dense_replace
            start = router_layer * self._layouts[0].tensors["router"].stride
            self._rows(f"{prefix}gate.weight", "router", start)
            for expert in range(g.n_routed_experts):
                first = expert * g.expert_units
                self._ffn(layer, f"{prefix}experts.{expert}.", first, gate_up_scale, down_scale)
            shared = f"{prefix}shared_experts."
            self._ffn(layer, shared, g.routed_units, gate_up_scale, down_scale)
        for layout in self._layouts:
            own = slice(layout.rank, None, self._topology.ranks)
            for target, scales in (
                ("ffn_gate_up_scale", gate_up_scale[own]),
                ("ffn_down_scale", down_scale[own]),
            ):
                if len(scales):
                    start = layout.unit_offsets[layer] * layout.tensors[target].stride
                    self._write(layout.rank, target, start, np.ascontiguousarray(scales))

    def _ffn(
        self, layer: int, prefix: str, first: int, gate_up_scale: Array, down_scale: Array
    ) -> None:
        """One FFN, whose units have the indices from `first` on in the layer."""
        hidden = self._geometry.hidden_size
        gate, up, down = (
            self._snapshot.tensors[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        width = gate.shape[0]
        unit = self._buffer("gate_up", (BLOCK, 2, hidden))
        flat = unit.reshape(-1)
        sources = ((gate, self._scales(gate)), (up, self._scales(up)))
        bands = zip(
            self._reader.bands(gate, BLOCK, "a"), self._reader.bands(up, BLOCK, "b"), strict=True
        )
        for u, pair in enumerate(bands):
            unit[len(pair[0]) :] = 0  # the last unit may be narrower
            for which, ((source, given), band) in enumerate(zip(sources, pair, strict=True)):
                self._quantise(
                    source,
                    band,
                    u * BLOCK,
                    flat[which * hidden :],
                    gate_up_scale[first + u, which],
                    None if given is None else given[u],
                    row_stride=2 * hidden,
                    block_stride=BLOCK,
                )
            self._write_unit(layer, first + u, "ffn_gate_up", unit)

        # Every row of down crosses all units: collect them, then write unit by unit.
        out = self._buffer(f"down {width}", (units_of(width), hidden, BLOCK))
        flat, given = out.reshape(-1), self._scales(down)
        for block, band in enumerate(self._reader.bands(down, BLOCK, "a")):
            self._quantise(
                down,
                band,
                block * BLOCK,
                flat[block * BLOCK * BLOCK :],
                down_scale[first : first + len(out), block],
                None if given is None else given[block],
                row_stride=BLOCK,
                block_stride=hidden * BLOCK,
            )
        for u, data in enumerate(out):
            self._write_unit(layer, first + u, "ffn_down", data)

    def _quantise(
        self,
        source: SourceTensor,
        band: Array,
        first_row: int,
        out: Array,
        scales: Array,
        given: Array | None,
        *,
        row_stride: int,
        block_stride: int,
    ) -> None:
        """One row of blocks, quantised, or passed through with the scales `given` to them."""
        if given is not None:
            self._refuse_nan(source, band, first_row)
            place(band, out, row_stride=row_stride, block_stride=block_stride)
            scales[:] = given
            return
        found = np.empty(len(scales), np.float32)
        bad = quantise_band(
            band,
            out,
            found,
            row_stride=row_stride,
            block_stride=block_stride,
            device=self._device,
        )
        if bad >= 0:
            row, column = divmod(bad, band.shape[1])
            raise _not_finite(source, first_row + row, column, band[row, column])
        scales[:] = found

    def _scales(self, source: SourceTensor) -> Array | None:
        """The fp32 block scales of an E4M3 weight; None for another dtype."""
        if source.dtype != "F8_E4M3":
            return None
        tensor = self._snapshot.tensors[scale_name(source.name)]
        scales = self._reader.whole(tensor)
        bad = ~((scales >= 0) & (scales <= _MAX_SCALE))
        if bad.any():
            row, column = divmod(int(bad.argmax()), scales.shape[1])
            value = scales[row, column]
            raise damaged(tensor, f"{value}, no scale", (row, column))
        return scales

    @staticmethod
    def _refuse_nan(source: SourceTensor, band: Array, first_row: int) -> None:
        bad = first_e4m3_nan(band)
        if bad >= 0:
            row, column = divmod(bad, band.shape[1])
            raise damaged(source, "NaN", (first_row + row, column))

    # ---- writing ----

    def _buffer(self, name: str, shape: tuple[int, ...]) -> Array:
        """A zeroed buffer, kept for next time: what is never written, as padding is, stays zero."""
        if name not in self._buffers:
            self._buffers[name] = np.zeros(shape, np.uint8)
        return self._buffers[name]

    def _write_unit(self, layer: int, unit: int, target: str, data: Array) -> None:
        rank = self._topology.unit_rank(unit)
        slot = self._layouts[rank].unit_offsets[layer] + self._topology.unit_slot(unit)
        self._write(rank, target, slot * data.nbytes, data)

    def _write(self, rank: int, target: str, start: int, data: Array) -> None:
        spec = self._layouts[rank].tensors[target]
        assert start + data.nbytes <= spec.nbytes
        self._sink.write(rank, spec.part, spec.offset + start, data.reshape(-1).view(np.uint8).data)


def _not_finite(source: SourceTensor, row: int, column: int, value: Any) -> BadInput:
    bits = source.dtype == "BF16"
    number = float(np.uint32(int(value) << 16).view(np.float32)) if bits else float(value)
    why = "NaN" if np.isnan(number) else "infinite" if np.isinf(number) else "too large for bf16"
    return damaged(source, why, (row, column) if len(source.shape) > 1 else (row,))
