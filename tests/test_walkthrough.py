"""docs/walkthrough.md is true: its tables, hops and modules are those of the code."""

import ast
import contextlib
import io
import math
import re
from functools import cache
from pathlib import Path

import pytest

from dsv2mk.kernel import plan as constants
from dsv2mk.kernel.plan import HOPS, Plan
from dsv2mk.manifests.geometry import Geometry, preset_config
from dsv2mk.manifests.topology import Topology

ROOT = Path(__file__).parents[1]
THREE = [("deepseek-v2", 1), ("deepseek-v2", 8), ("deepseek-v2-lite", 1)]
FIVE = [("deepseek-v2", 1), ("deepseek-v2", 2), *THREE[1:], ("tiny", 1)]
ITEM = {"BF16": 2, "F8_E4M3": 1, "F32": 4}
CTAS = 132


@cache
def plan_of(name: str, ranks: int) -> Plan:
    geometry = Geometry.from_config(preset_config(name))
    return Plan(geometry=geometry, topology=Topology(ranks=ranks))


@cache
def document() -> str:
    return (ROOT / "docs" / "walkthrough.md").read_text(encoding="utf-8")


def table(header: str) -> dict[str, list[str]]:
    """Rows of the one table whose first column is headed so: cells by the name in the first."""
    (found,) = re.findall(rf"^\| {header} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", document(), re.M)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()]
    names = [row[0].strip("`") for row in rows]
    assert len(set(names)) == len(names)
    return {name: row[1:] for name, row in zip(names, rows, strict=True)}


def numbers(cell: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", cell)]


@pytest.mark.parametrize(("column", "case"), enumerate(THREE))
def test_weights_are_those_of_the_layout(column: int, case: tuple[str, int]) -> None:
    tensors, rows = plan_of(*case).layout.tensors, table("tensor")
    assert set(tensors) - {"ffn_unit_offset"} == {
        name for name, cells in rows.items() if cells[column] != "none"
    }
    for name, cells in rows.items():
        if cells[column] != "none":
            shape = list(tensors[name].shape)
            if name not in ("final_norm", "lm_head"):
                shape = shape[1:]  # of a layer, unit or token
            size = math.prod(shape) * ITEM[tensors[name].dtype]
            assert numbers(cells[column]) == [*shape, size], name


@pytest.mark.parametrize(("column", "case"), enumerate(THREE))
def test_buffers_are_those_of_the_workspace(column: int, case: tuple[str, int]) -> None:
    found = {name: numbers(cells[column]) for name, cells in table("buffer").items()}
    exchange = plan_of(*case).exchange
    assert found == {name: list(shape) for name, (_, shape) in exchange.items() if name != "end"}


@pytest.mark.parametrize(("column", "case"), enumerate(FIVE))
def test_derived_quantities_are_those_of_the_plan(column: int, case: tuple[str, int]) -> None:
    rows = table("quantity")
    assert {"slot", "slots", "down_rows", "down_units", "tiles", "min_ctas"} <= set(rows)
    found = {name: cells[column] for name, cells in rows.items()}
    assert found == {name: str(getattr(plan_of(*case), name)) for name in rows}


@pytest.mark.parametrize(("column", "case"), enumerate(FIVE))
def test_chunks_are_those_of_the_plan(column: int, case: tuple[str, int]) -> None:
    plan, rows = plan_of(*case), table("matrix")
    assert set(rows) == {"gate_up", *plan.runs} - {"rows"}
    for name, cells in rows.items():
        matrix = getattr(plan, name)
        total = matrix.chunks * (plan.most_units if name == "gate_up" else 1)
        owned = [(cta + 1) * total // CTAS - cta * total // CTAS for cta in range(CTAS)]
        fixed = [matrix.chunk_rows, matrix.pieces, matrix.window, matrix.chunks]
        assert numbers(cells[column]) == [*fixed, max(owned) * matrix.pieces], name


def test_kv_chunks_are_those_of_the_plan() -> None:
    (found,) = re.findall(r"A KV chunk has (.*?)\.", document(), re.S)
    expected = [constants.KV_CHUNK]
    for case in (FIVE[0], FIVE[-1]):
        size = constants.KV_CHUNK * plan_of(*case).cache_row * 2
        expected += [size, constants.window_of(size)]
    assert numbers(found.replace("bf16", "")) == expected


@pytest.mark.parametrize(("column", "case"), enumerate(THREE[:2]))
def test_the_map_of_shared_memory_is_that_of_the_plan(column: int, case: tuple[str, int]) -> None:
    plan, rows = plan_of(*case), table("region")
    places = [[int(cell) for cell in cells[2 * column : 2 * column + 2]] for cells in rows.values()]
    offsets = [offset for offset, _ in places]
    assert list(zip(rows, offsets, strict=True)) == list(plan.smem.items())
    assert [sum(place) for place in places] == [*offsets[1:], plan.smem_bytes]
    assert places[-1][1] == plan.slots * (plan.slot + plan.scale_bytes)


@pytest.mark.parametrize(("column", "case"), enumerate(THREE))
def test_uses_of_region_x_are_counted_from_the_geometry(column: int, case: tuple[str, int]) -> None:
    plan, rows = plan_of(*case), table("phase")
    g = plan.geometry

    def heads_touched(name: str, head_rows: int) -> int:
        matrix = getattr(plan, name)
        most = 0
        for cta in range(CTAS):
            first, end = (n * matrix.chunks // CTAS * matrix.chunk_rows for n in (cta, cta + 1))
            most = max(most, len({row // head_rows for row in range(first, end)}))
        return most

    pass_tokens = constants.KV_CHUNK * constants.KV_CHUNKS
    queries = 2 * 16 * plan.cache_row * 2
    scores, probabilities = 4 * 16 * (pass_tokens + 4) * 4, 2 * 16 * (pass_tokens + 8) * 2
    expected = [
        4 * g.hidden_size,
        4 * g.q_in,
        4 * g.qk_nope_head_dim * heads_touched("w_uk", g.kv_lora_rank),
        queries + scores + probabilities,
        4 * g.kv_lora_rank * heads_touched("w_uv", g.v_head_dim),
        4 * plan.heads * g.v_head_dim,
        3 * 4 * g.hidden_size,
        128 * (2 + 2) * plan.most_units,
    ]
    assert [int(cells[1 + column]) for cells in rows.values()] == expected
    assert max(expected) == plan.activation_bytes


def test_units_at_work_are_those_of_the_topology() -> None:
    (found,) = re.findall(r"Units at work in a layer of a rank: (.*?)\.\n", document(), re.S)
    counts = []
    for name, ranks in THREE:
        plan = plan_of(name, ranks)
        g, topology = plan.geometry, plan.topology
        # A rank's units of a layer, less its routed ones, which come first.
        always = topology.rank_units(g.layer_units(g.num_hidden_layers - 1), 0)
        always -= topology.rank_units(g.routed_units, 0)
        counts.append((topology.rank_units(g.layer_units(0), 0), always, plan.routed_slots))
    one, eight, lite = counts
    expected = [one[0], 1, eight[0], 8, one[1], eight[1], one[2], eight[2], *lite]
    assert numbers(found.replace("V2", "")) == expected


def test_the_example_of_the_ring_follows_the_protocol() -> None:
    slots, window = 4, 2
    for name, cells in table("chunk").items():
        chunk = int(name)
        producer, slot, use, landed, read, issued = map(numbers, cells)
        assert (producer, slot) == ([chunk % slots % 2], [chunk % slots])
        assert use == [chunk // slots, chunk // slots % 2]
        for found, before in ((landed, chunk - window), (read, chunk - slots)):
            wanted = [before, before % slots, before // slots % 2] if before >= 0 else []
            assert found == wanted
        assert issued == [*producer, chunk + 1]


def sections() -> dict[str, str]:
    """Text of each phase's section by its hop, in the document's order."""
    parts = re.split(r"^(#+ .*)\n", document(), flags=re.M)[1:]
    out = {}
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        if found := re.search(r"hop `(\w+)`", heading):
            out[found[1]] = text
    return out


def test_the_document_follows_every_hop_in_order() -> None:
    assert tuple(sections()) == HOPS


def test_reuse_of_each_buffer_is_argued_as_in_the_code() -> None:
    """The table in hops.py and the document name the same hop for each buffer."""
    source = (ROOT / "kernel" / "hops.py").read_text(encoding="utf-8")
    contract = ast.get_docstring(ast.parse(source)) or ""
    rows = re.findall(r"^\| (\w+) \| (.+) \| (.+) \|$", contract, re.M)
    after = {name: re.findall(r"\w+", last)[0] for name, _, last in rows if name != "buffer"}
    assert set(after) == set(HOPS)
    for name, text in sections().items():
        (claim,) = re.findall(r"Written again after([^.;(]*)", text)
        assert f"`{after[name]}`" in claim, name


def test_every_module_of_the_kernel_is_mentioned() -> None:
    modules = {path.name for path in (ROOT / "kernel").glob("*.py")} - {"__init__.py"}
    assert modules <= set(re.findall(r"`(\w+\.py)`", document()))


def test_the_snippet_prints_the_tables() -> None:
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", document(), re.M | re.S)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(snippet, "docs/walkthrough.md", "exec"), {})
    printed = out.getvalue().splitlines()
    lines = document().splitlines()
    missing = [row for row in printed if not any(line.startswith(row) for line in lines)]
    assert missing == []
    headers = ("tensor", "buffer", "quantity", "matrix", "region")
    assert len(printed) == sum(len(table(header)) for header in headers)
