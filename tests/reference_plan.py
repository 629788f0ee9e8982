"""What a plan must hold to, counted another way: from the kernel's loads, stores and loops.

And what a kernel's PTX says of them.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator

from dsv2mk.kernel import plan as constants
from dsv2mk.kernel.plan import HOPS, Matrix, Plan

STREAMED = ("qkv_a", "q_b", "w_uk", "w_uv", "o", "router", "lm_head")
#: Matrices whose rows have the vector of their head, and the field that says how many a head has.
PER_HEAD = {"w_uk": "kv_lora_rank", "w_uv": "v_head_dim"}


def check_plan(plan: Plan) -> None:
    check_chunks(plan)
    check_down(plan)
    check_shared_memory(plan)
    check_workspace(plan)
    check_grids(plan, (1, 2, 3, 5, 7, 132, 256))
    units, routed = most_at_work(plan)
    assert units <= plan.most_units
    assert routed <= plan.routed_slots


# ---- chunks ----


def straddles(plan: Plan) -> list[str]:
    """Matrices of long rows with a chunk over two heads, which would share one head's vector."""
    return [
        name
        for name, field in PER_HEAD.items()
        if getattr(plan, name).width > 128
        and getattr(plan.geometry, field) % getattr(plan, name).chunk_rows
    ]


def check_window(window: int, chunk_bytes: int) -> None:
    """About 40 KiB in flight, an even number of chunks, and no more than any ring has slots."""
    assert window in (2, 4, 6, 8)
    others = [abs(n * chunk_bytes - 40 * 1024) for n in (2, 4, 6, 8)]
    assert abs(window * chunk_bytes - 40 * 1024) == min(others)


def check_chunks(plan: Plan) -> None:
    for name in (*STREAMED, "gate_up"):
        matrix: Matrix = getattr(plan, name)
        if name == "gate_up":  # a row is a gate row beside its up row, fp8
            stored, row_bytes = plan.tensor("ffn_gate_up").stride, 2 * matrix.width
        elif name == "router" and plan.geometry.num_moe_layers == 0:
            continue
        else:
            spec = plan.tensor(name)
            stored = spec.nbytes if name == "lm_head" else spec.stride
            row_bytes = 2 * matrix.width
        assert matrix.row_bytes == row_bytes
        assert matrix.rows * row_bytes == stored
        assert matrix.chunks * matrix.chunk_rows == matrix.rows
        assert matrix.chunk_bytes * matrix.pieces == matrix.chunk_rows * row_bytes
        assert matrix.chunk_bytes <= plan.slot
        assert matrix.chunk_bytes % 16 == 0
        check_window(matrix.window, matrix.chunk_bytes)
        if matrix.pieces > 1:
            assert name not in ("gate_up", "lm_head")  # their consumers know whole rows only
            assert (matrix.chunk_rows, matrix.width % matrix.pieces) == (1, 0)
            assert matrix.width // matrix.pieces % 256 == 0
            assert row_bytes > plan.slot
    assert straddles(plan) == []
    assert 8 * plan.cache_row * 2 <= plan.slot  # a chunk of the cache


def check_down(plan: Plan) -> None:
    blocks = plan.geometry.hidden_size // 128
    assert plan.down_rows % 8 == 0
    assert 8 <= plan.down_rows <= 64
    assert 1 <= plan.down_units <= 16  # a lane issues the copies of a unit
    assert plan.down_units * plan.down_rows * 128 <= plan.slot
    check_window(plan.down_window, plan.down_units * plan.down_rows * 128)
    assert plan.down_scale % 16 == 0
    # Copies start on 16 bytes: at most 12 before the unit's scales.
    assert plan.down_scale >= 4 * blocks + 12
    assert plan.down_units * plan.down_scale <= plan.scale_bytes
    assert 2 * 4 * blocks <= plan.scale_bytes
    assert 2 * 4 * blocks % 16 == 0
    assert plan.scale_bytes % 128 == plan.slot % 128 == 0


# ---- shared memory ----


def vector_size(width: int) -> int:
    """Bytes of a stored vector, by the place of each of its elements."""
    lanes = next(n for n in (1, 2, 4, 8, 16, 32) if n == 32 or n * 8 >= width)
    places = set()
    for e in range(width):
        step, lane, half = e // (8 * lanes), e // 8 % lanes, e // 4 % 2
        places.add(((2 * step + half) * lanes + lane) * 16 + e % 4 * 4)
    assert len(places) == width
    return max(places) + 4


def needs(plan: Plan) -> dict[str, int]:
    """Bytes that the kernel writes in each region, counted from what it puts there."""
    g, heads = plan.geometry, plan.geometry.num_attention_heads // plan.ranks
    queries = 2 * 16 * plan.cache_row * 2
    scores = 4 * 16 * plan.score_row * 4 + 2 * 16 * plan.p_row * 2
    x = [3 * 4 * g.hidden_size, vector_size(g.q_in), vector_size(heads * g.v_head_dim)]
    x += [plan.most_units * 128 * 4, queries + scores, heads * vector_size(g.qk_nope_head_dim)]
    x += [plan.heads_touched(plan.min_ctas) * vector_size(g.kv_lora_rank)]
    return {
        **dict.fromkeys(("full", "empty"), 8 * plan.slots),
        **dict.fromkeys(("routed", "old_kv", "new_kv", "issued", "pushed"), 8),
        **dict.fromkeys(("routed_count", "count", "abort", "finished", "left"), 4),
        **dict.fromkeys(("position", "token", "x_top"), 4),
        "waits": constants.THREADS // 32 * 16,
        "runs": 8 * 8,
        "units": 12,
        "kv_run": 16,
        "reduce": 2 * 16 * 4,
        "undo": plan.most_units * 4,
        "turns": g.qk_rope_head_dim // 2 * 8,
        "rope": g.qk_rope_head_dim // 2 * 8,
        "unit": plan.routed_slots * 4,
        "unit_weight": plan.routed_slots * 4,
        "scores": g.n_routed_experts * 4,
        "correction": 16 * 4,
        "best": 2 * 16 * 4,
        "down": 16 * plan.down_rows * 4,
        "x": max(x),
        "ring": plan.slots * (plan.slot + plan.scale_bytes),
    }


def check_shared_memory(plan: Plan) -> None:
    sizes = needs(plan)
    assert set(plan.smem) == set(sizes)
    end = 0
    for name, start in sorted(plan.smem.items(), key=lambda item: (item[1], sizes[item[0]])):
        assert start >= end, name
        assert start % 16 == 0
        end = start + sizes[name]
    assert plan.smem["ring"] % 128 == 0
    assert plan.smem_bytes == end <= 226 * 1024
    assert end + 2 * (plan.slot + plan.scale_bytes) > 226 * 1024  # no pair of slots is left out
    assert plan.slots in range(8, 33, 2)  # a pass of attention; mbarriers; a producer a slot


# ---- workspace ----


def check_workspace(plan: Plan) -> None:
    places = sorted(plan.counters.values())
    assert list(plan.counters) == [*HOPS, "abort"]
    assert places == [128 * index for index in range(len(places))]
    assert plan.exchange_offset >= places[-1] + 128
    assert plan.exchange_offset % 256 == 0
    g, heads = plan.geometry, plan.heads
    needed = {
        "qkv": (g.q_lora_rank or 0) + g.kv_lora_rank + g.qk_rope_head_dim,
        "q": heads * (g.qk_nope_head_dim + g.qk_rope_head_dim),
        "q_lat": heads * g.kv_lora_rank,
        "partial": 256 * 16 * g.kv_lora_rank,
        "partial_ml": 256 * 16 * 2,
        "latent": heads * g.kv_lora_rank,
        "value": heads * g.v_head_dim,
        "o": plan.ranks * g.hidden_size,
        "route": g.n_routed_experts,
        "chosen": 2 * g.num_experts_per_tok,
        "act": plan.most_units * 128,
        "down": plan.ranks * g.hidden_size,
        "best": plan.ranks * 256 * 2,
    }
    buffers = dict(plan.exchange)
    assert buffers.pop("end") == (plan.exchange_bytes, ())
    assert {name: math.prod(shape) for name, (_, shape) in buffers.items()} == needed
    end = 0
    for offset, shape in sorted(buffers.values()):
        assert offset >= end
        assert offset % 16 == 0
        end = offset + 4 * math.prod(shape)
    assert end <= plan.exchange_bytes


# ---- grids ----


def touched(plan: Plan, ctas: int) -> int:
    """Most heads whose rows of W_UV a CTA owns, row by row."""
    most, chunks, rows = 0, plan.w_uv.chunks, plan.w_uv.chunk_rows
    for cta in range(ctas):
        own = range(cta * chunks // ctas * rows, (cta + 1) * chunks // ctas * rows)
        most = max(most, len({row // plan.geometry.v_head_dim for row in own}))
    return most


def check_grids(plan: Plan, grids: Iterable[int]) -> None:
    fit = plan.activation_bytes // vector_size(plan.geometry.kv_lora_rank)
    tiles = math.ceil(plan.heads / 16)
    least = plan.min_ctas
    assert least >= tiles
    assert plan.heads_touched(least) == touched(plan, least) <= fit
    assert least == tiles or touched(plan, least - 1) > fit
    for ctas in grids:
        assert plan.heads_touched(ctas) == touched(plan, ctas)
        assert ctas < least or touched(plan, ctas) <= fit  # all larger grids may be asked for


# ---- units at work ----


def most_at_work(plan: Plan) -> tuple[int, int]:
    """(units, routed units) of the worst rank and routing, over all choices of groups."""
    g, owner = plan.geometry, plan.topology.unit_rank
    always = [0] * plan.ranks
    counts = [[0] * g.n_routed_experts for _ in range(plan.ranks)]
    for expert in range(g.n_routed_experts):
        for unit in range(g.expert_units):
            counts[owner(expert * g.expert_units + unit)][expert] += 1
    for unit in range(g.shared_units):
        always[owner(g.routed_units + unit)] += 1
    units = routed = 0
    per_group = g.experts_per_group
    for rank in range(plan.ranks if g.num_moe_layers else 0):
        for groups in itertools.combinations(range(g.n_group), g.topk_group):
            own = [counts[rank][x * per_group + i] for x in groups for i in range(per_group)]
            most = sum(sorted(own)[-g.num_experts_per_tok :])
            units, routed = max(units, always[rank] + most), max(routed, most)
    if g.first_k_dense_replace:
        dense = [owner(unit) for unit in range(g.layer_units(0))]
        units = max(units, *(dense.count(rank) for rank in range(plan.ranks)))
    return units, routed


# ---- PTX ----


def instructions(ptx: str) -> Iterator[str]:
    """Instructions of a PTX text without guards, labels, comments and braces."""
    for line in re.sub(r"//[^\n]*", "", ptx).splitlines():
        for part in line.split(";"):
            text = re.sub(r"^(@!?%\w+\s+)", "", part.strip(" \t{}"))
            if re.match(r"[a-z]", text):
                yield text


def through_peers(ptx: str, listed: int) -> tuple[set[int], list[str]]:
    """Offsets at which `peers`, parameter `listed`, is read; what uses the addresses found there.

    Followed from the parameter through sums and copies, each register being written once.
    """
    places: dict[str, int] = {}  # register with an address in `peers`: the offset
    found: set[str] = set()  # registers that derive from an address found there
    offsets, users = set(), []
    for text in instructions(ptx):
        name, registers = text.split()[0], re.findall(r"%\w+", text)
        number = re.search(r"(?:, |\+)(\d+)\]?$", text)
        offset = int(number[1]) if number else 0
        if name.startswith("ld.param") and f"_param_{listed}]" in text:
            places[registers[0]] = 0
        elif name.startswith("add.s64") and registers[1] in places:
            places[registers[0]] = places[registers[1]] + offset
        elif name.startswith("ld.global.b64"):
            offsets.add(places[registers[1]] + offset)
            found.add(registers[0])
        elif found.intersection(registers):
            if name.startswith(("add.s64", "mov.")):
                found.add(registers[0])
            else:
                users.append(name)
    return offsets, users
