"""What the kernel derives from geometry and topology before it is traced: pure arithmetic.

| quantity | how | DeepSeek-V2, R = 1 / 8 | why |
|---|---|---|---|
| slot | the longest row or KV chunk, 8 to 16 KiB | 10240 | one bulk copy, one warp's work |
| slots | what shared memory has left over | 14 / 14 | what has landed hides a hop |
| window | 40 KiB / bytes of a chunk | 4 | more delays the hops, less starves the stream |
| pieces | row bytes / slot, where a row is longer | 4 of o | they go to one warp, in order |
| rows a chunk | as fit in a slot, and deal evenly to 132 CTAs | 1 of qkv_a, 32 of w_uk | |
| down rows | rows of H that a CTA owns, by eights | 40 | sums of a unit's rows stay in registers |
| head tiles | ceil(heads / 16) | 8 / 1 | one m16 tensor-core tile reads the cache once |
| min CTAs | head tiles, and what region `x` holds | 8 / 1 | a smaller grid is refused |

Words: a *chunk* is what one ring slot holds; rows of a matrix are dealt to CTAs in contiguous runs
of chunks, and the chunks of a run to the CTA's warps in turn.
"""

from dataclasses import dataclass
from functools import cached_property

from dsv2mk.manifests.errors import InputError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.layout import RankLayout, TensorSpec
from dsv2mk.manifests.scheme import BLOCK
from dsv2mk.manifests.sidecar import COLLECTIVES
from dsv2mk.manifests.topology import Topology

#: Consumer warps of a CTA: four warpgroups. A fifth holds the other roles, a warp each.
WARPS = 16
PRODUCERS = (WARPS, WARPS + 1)
SCOUT, WATCHDOG = WARPS + 2, WARPS + 3
THREADS = 32 * (WARPS + 4)
#: Registers a thread of either kind may use; together what a CTA of THREADS * 96 is given.
CONSUMER_REGISTERS, SERVICE_REGISTERS = 104, 64
#: Dynamic shared memory that a CTA may use on sm_90, sm_100 and sm_103: 227 KiB less what the
#: compiler takes.
SMEM = 226 * 1024
#: Bytes of the weight stream in flight in a CTA.
WINDOW = 40 * 1024
#: CTAs for which workspace is laid out; and a usual number, for which rows are dealt evenly.
MAX_CTAS, USUAL_CTAS = 256, 132
#: Tokens of a KV chunk (an n8 tensor-core tile), and chunks that one pass of attention takes.
KV_CHUNK, KV_CHUNKS = 8, 8
#: Heads of a tensor-core tile.
TILE = 16
#: Elements that a lane takes at a time from a row of a GEMV.
STEP = 8
#: Slots that a ring must have.
MIN_SLOTS = 8
#: Longest slot, and shortest that a chunk of rows aims at.
MAX_SLOT, MIN_SLOT = 16384, 8192

#: Exchanges of a layer in order; `best` is the argmax's, once a token. See hops.py.
HOPS = ("qkv", "q", "q_lat", "partial", "value", "o", "route", "act", "down", "best")

#: Phases, as the watchdog names them. An exchange's number is its place in HOPS.
PHASES = (*HOPS, "embed", "kv stream", "routed units", "weight stream", "ring slot", "drain")


def lanes_of(width: int) -> int:
    """Lanes that a row of `width` elements is spread over: a power of two, at most 32."""
    lanes = 1
    while lanes < 32 and lanes * STEP < width:
        lanes *= 2
    return lanes


def vector_bytes(width: int) -> int:
    """Bytes that a vector of `width` fp32 takes in shared memory: whole steps. See gemv.py."""
    step = STEP * lanes_of(width)
    return -(-width // step) * step * 4


def window_of(chunk_bytes: int) -> int:
    """Chunks of this size that are in flight: an even number, half of them of each producer."""
    return min(max(2, 2 * round(WINDOW / chunk_bytes / 2)), MIN_SLOTS)


@dataclass(kw_only=True, slots=True, frozen=True)
class Matrix:
    """How the rows of one matrix, of one layer, pass through the ring."""

    rows: int  # rows of one layer (or unit) that this rank reads
    row_bytes: int
    width: int  # reduction length, elements
    chunk_rows: int
    pieces: int = 1

    @property
    def chunks(self) -> int:
        """Chunks of all CTAs, with pieces counted once; all are whole."""
        return self.rows // self.chunk_rows

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a whole chunk (of one piece, where a row has several)."""
        return self.chunk_rows * self.row_bytes // self.pieces

    @property
    def window(self) -> int:
        """Chunks in flight."""
        return window_of(self.chunk_bytes)


@dataclass(kw_only=True, frozen=True)
class Plan:
    """Constants of one kernel."""

    geometry: Geometry
    topology: Topology
    collective: str = "p2p"  # or multimem: see hops.py

    def __post_init__(self) -> None:
        g = self.geometry
        self.topology.check(g)
        if self.collective not in COLLECTIVES:
            raise InputError(
                "the kernel: collective", expected=" or ".join(COLLECTIVES), found=self.collective
            )
        if self.collective == "multimem" and self.ranks == 1:
            raise InputError("the kernel: collective multimem", expected="several ranks", found=1)
        wide = [("hidden_size", g.hidden_size, 2 * BLOCK), ("kv_lora_rank", g.kv_lora_rank, 32)]
        wide += [("qk_rope_head_dim", g.qk_rope_head_dim, 16), ("v_head_dim", g.v_head_dim, 8)]
        wide += [
            ("qk_nope_head_dim", g.qk_nope_head_dim, 8),
            ("q_lora_rank", g.q_lora_rank or 8, 8),
        ]
        for name, value, factor in wide:
            if value % factor:
                raise InputError(
                    f"the kernel: {name}", expected=f"a multiple of {factor}", found=value
                )
        limits = [
            ("hidden_size", g.hidden_size, MAX_SLOT // 2),
            ("kv_lora_rank", g.kv_lora_rank, 512),
            ("n_routed_experts", g.n_routed_experts, 512),
        ]
        limits += [("n_group", g.n_group, 32), ("qk_rope_head_dim", g.qk_rope_head_dim, 64)]
        for name, value, most in limits:
            if value > most:
                raise InputError(f"the kernel: {name}", expected=f"at most {most}", found=value)
        most_dealt = max(*self.runs.values(), self.most_units * BLOCK)
        if most_dealt * MAX_CTAS >= 2**31:  # see stream.deal
            raise InputError(
                "the kernel: rows of one matrix", expected="fewer than 2^23", found=most_dealt
            )
        if self.slots >= MIN_SLOTS and not self.min_ctas:
            raise InputError(
                "the kernel: heads of a rank",
                expected=f"as many as {MAX_CTAS} CTAs can merge",
                found=self.heads,
            )
        if self.slots < MIN_SLOTS:
            raise InputError(
                "the kernel: shared memory for the weight ring of this geometry",
                expected=f"at least {MIN_SLOTS} slots",
                found=self.slots,
            )

    # ---- sizes ----

    @cached_property
    def layout(self) -> RankLayout:
        """Layout of rank 0: all ranks place the tensors before the FFN units alike."""
        return RankLayout(geometry=self.geometry, topology=self.topology, rank=0)

    def tensor(self, name: str) -> TensorSpec:
        """A stored tensor."""
        return self.layout.tensors[name]

    @property
    def ranks(self) -> int:
        """R."""
        return self.topology.ranks

    @property
    def heads(self) -> int:
        """Heads of the rank."""
        return self.topology.heads(self.geometry)

    @property
    def tiles(self) -> int:
        """Tensor-core tiles of heads."""
        return -(-self.heads // TILE)

    @property
    def cache_row(self) -> int:
        """bf16 of a token's cache row: kv_lora + rope, padded so that 8 rows share no bank."""
        width = self.geometry.cache_width
        return width + (8 - width) % 16

    @property
    def blocks(self) -> int:
        """Scale blocks along H."""
        return -(-self.geometry.hidden_size // BLOCK)

    @property
    def most_units(self) -> int:
        """Most units of a layer at work on a rank, dense layers included."""
        g, ranks = self.geometry, self.ranks
        moe = -(-g.shared_units // ranks) + g.num_experts_per_tok * -(-g.expert_units // ranks)
        dense = -(-g.layer_units(0) // ranks) if g.first_k_dense_replace else 0
        return max(moe if g.num_moe_layers else 0, dense)

    @property
    def routed_slots(self) -> int:
        """Most routed units at work on a rank."""
        g = self.geometry
        return g.num_experts_per_tok * -(-g.expert_units // self.ranks) if g.num_moe_layers else 0

    # ---- the ring ----

    @cached_property
    def slot(self) -> int:
        """Bytes of weights that a slot holds."""
        g = self.geometry
        kv = KV_CHUNK * self.cache_row * 2
        rows = [2 * g.hidden_size, kv, MIN_SLOT]
        return -(-max(size for size in rows if size <= MAX_SLOT) // 128) * 128

    @property
    def scale_bytes(self) -> int:
        """Bytes of a slot for the scales of its units, with room to align a copy."""
        return -(-max(8 * self.blocks, self.down_units * self.down_scale) // 128) * 128

    @property
    def down_scale(self) -> int:
        """Bytes of the copy of a unit's down scales, which starts at most 12 bytes before them."""
        return -(-(4 * self.blocks + 12) // 16) * 16

    @property
    def slots(self) -> int:
        """Slots of the ring: as many as fit, an even number, so that each has one producer."""
        return (SMEM - self.ring_offset) // (self.slot + self.scale_bytes) // 2 * 2

    def matrix(self, rows: int, width: int, item: int, sharing: int | None = None) -> Matrix:
        """Chunks of a matrix of `rows` rows of `width` elements.

        sharing: rows that are multiplied with the same vector, if not all; a chunk is of such rows.
        """
        row_bytes = width * item
        if row_bytes > self.slot:
            fitting = (
                n
                for n in range(2, width)
                if width % (n * 32 * STEP) == 0 and row_bytes // n <= self.slot
            )
            pieces = next(fitting, 0)
            if not pieces:
                raise InputError(
                    "the kernel: a row that is cut to fit a slot",
                    expected=f"{32 * STEP}-element pieces of at most {self.slot} bytes",
                    found=f"{width} elements",
                )
            return Matrix(rows=rows, row_bytes=row_bytes, width=width, chunk_rows=1, pieces=pieces)
        most = self.slot // row_bytes

        def load(chunk: int) -> int:  # rows of the busiest CTA
            return -(-(rows // chunk) // USUAL_CTAS) * chunk

        sizes = [n for n in range(1, most + 1) if (sharing or rows) % n == 0]
        best = min(load(n) for n in sizes)
        # A chunk of 4 KiB and more streams well: past that, evenness decides.
        good = [n for n in sizes if load(n) <= max(best * 1.05, best)]
        return Matrix(rows=rows, row_bytes=row_bytes, width=width, chunk_rows=max(good))

    @cached_property
    def qkv_a(self) -> Matrix:
        """q_a and kv_a."""
        return self.matrix(self.geometry.qkv_a_rows, self.geometry.hidden_size, 2)

    @cached_property
    def q_b(self) -> Matrix:
        """q_b, or q_proj."""
        return self.matrix(self.heads * self.geometry.qk_head_dim, self.geometry.q_in, 2)

    @cached_property
    def w_uk(self) -> Matrix:
        """W_UK."""
        g = self.geometry
        return self.matrix(self.heads * g.kv_lora_rank, g.qk_nope_head_dim, 2, g.kv_lora_rank)

    @cached_property
    def w_uv(self) -> Matrix:
        """W_UV."""
        g = self.geometry
        return self.matrix(self.heads * g.v_head_dim, g.kv_lora_rank, 2, g.v_head_dim)

    @cached_property
    def o(self) -> Matrix:
        """o_proj."""
        g = self.geometry
        return self.matrix(g.hidden_size, self.heads * g.v_head_dim, 2)

    @cached_property
    def router(self) -> Matrix:
        """The router."""
        return self.matrix(self.geometry.n_routed_experts, self.geometry.hidden_size, 2)

    @cached_property
    def lm_head(self) -> Matrix:
        """lm_head."""
        return self.matrix(self.topology.vocab_rows(self.geometry), self.geometry.hidden_size, 2)

    @cached_property
    def gate_up(self) -> Matrix:
        """Gate and up rows of one unit, in pairs."""
        pair = 2 * self.geometry.hidden_size
        rows = max(n for n in (1, 2, 4, 8, 16, 32) if n * pair <= max(self.slot, pair))
        return Matrix(rows=BLOCK, row_bytes=pair, width=self.geometry.hidden_size, chunk_rows=rows)

    @property
    def runs(self) -> dict[str, int]:
        """What is dealt to CTAs in contiguous runs: chunks of each matrix, rows of H in down."""
        names = ("qkv_a", "q_b", "w_uk", "w_uv", "o", "router", "lm_head")
        dealt = {name: getattr(self, name).chunks for name in names}
        dealt["rows"] = self.geometry.hidden_size
        return dealt

    @property
    def down_rows(self) -> int:
        """Rows of down that a chunk has of each of its units; a CTA takes its rows in such runs."""
        rows = -(-self.geometry.hidden_size // USUAL_CTAS)
        return min(-(-rows // 8) * 8, 64)

    @property
    def down_units(self) -> int:
        """Units of a chunk of down."""
        return max(1, min(16, self.slot // (self.down_rows * BLOCK)))

    @property
    def down_window(self) -> int:
        """Chunks of down in flight."""
        return window_of(self.down_units * self.down_rows * BLOCK)

    # ---- shared memory ----

    @cached_property
    def smem(self) -> dict[str, int]:
        """Offset of each region of shared memory; the ring is last. See docs/walkthrough.md."""
        g = self.geometry
        sizes = {
            "full": 32 * 8,  # an mbarrier a slot: landed
            "empty": 32 * 8,  # an mbarrier a slot: consumed
            "routed": 8,  # an mbarrier: the list of routed units is there
            "routed_count": 4,  # how many it lists
            "count": 4,  # as the consumers have it
            "old_kv": 8,  # all tokens before this one are in the cache
            "new_kv": 8,  # and this one
            "issued": 8,  # by each producer: one more than the last chunk it has opened a slot for
            "pushed": 8,  # by each producer: layers of the launch that it has issued all of
            "abort": 4,
            "finished": 4,  # the consumers are done with the launch
            "waits": (WARPS + 4) * 16,  # what each warp waits for: see hops.py
            "position": 4,  # of the consumers
            "token": 4,
            "left": 4,  # tokens of the launch, this one included
            "runs": len(self.runs) * 8,  # [first, end) of the CTA, of each
            "units": 16,  # of the rank in a layer: ffn.store_units
            "kv_run": 16,  # of this token: attention.kv_run
            "reduce": 2 * WARPS * 4,
            "x_top": 4,  # largest magnitude of x, for the FFN
            "undo": self.most_units * 4,  # of each unit: see ffn.py
            "turns": g.qk_rope_head_dim // 2 * 8,  # fp64 turns a position of each pair
            "rope": g.qk_rope_head_dim // 2 * 8,  # (cos, sin) of this position
            "unit": self.routed_slots * 4,
            "unit_weight": self.routed_slots * 4,
            "scores": g.n_routed_experts * 4,
            "correction": 2 * TILE * 4,
            "best": 2 * WARPS * 4,
            "down": WARPS * self.down_rows * 4,
            "x": self.activation_bytes,
        }
        out, offset = {}, 0
        for name, size in sizes.items():
            out[name] = offset
            offset += -(-size // 16) * 16
        out["ring"] = -(-offset // 128) * 128
        return out

    @property
    def ring_offset(self) -> int:
        """Where the ring starts."""
        return self.smem["ring"]

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.ring_offset + self.slots * (self.slot + self.scale_bytes)

    @property
    def activation_bytes(self) -> int:
        """The region that holds each phase's input in turn."""
        g = self.geometry
        scores = 4 * TILE * self.score_row * 4 + 2 * TILE * self.p_row * 2
        return max(
            3 * vector_bytes(g.hidden_size),  # and scaled for gate and for up: see ffn.py
            vector_bytes(g.q_in),
            vector_bytes(self.heads * g.v_head_dim),
            4 * BLOCK * self.most_units,
            2 * 2 * TILE * self.cache_row + scores,
            vector_bytes(g.qk_nope_head_dim) * self.heads,
            2 * self.merged_head,
        )

    @property
    def score_row(self) -> int:
        """fp32 of a row of scores of one pass."""
        return KV_CHUNK * KV_CHUNKS + 4

    @property
    def p_row(self) -> int:
        """bf16 of a row of probabilities of one pass, padded against bank conflicts."""
        return KV_CHUNK * KV_CHUNKS + 8

    @property
    def merged_head(self) -> int:
        """Bytes that the merged latent of one head takes."""
        return vector_bytes(self.geometry.kv_lora_rank)

    def heads_touched(self, ctas: int) -> int:
        """Most heads whose W_UV rows one of `ctas` CTAs owns."""
        matrix, per_head = self.w_uv, self.geometry.v_head_dim
        most = 0
        for cta in range(ctas):
            first, last = (
                min(n * matrix.chunks // ctas * matrix.chunk_rows, matrix.rows)
                for n in (cta, cta + 1)
            )
            if last > first:
                most = max(most, (last - 1) // per_head - first // per_head + 1)
        return most

    @cached_property
    def min_ctas(self) -> int:
        """Fewest CTAs that can decode; 0 if MAX_CTAS are too few."""
        fitting = (
            ctas
            for ctas in range(self.tiles, MAX_CTAS + 1)
            if self.heads_touched(ctas) * self.merged_head <= self.activation_bytes
        )
        return next(fitting, 0)

    # ---- workspace in global memory ----

    @cached_property
    def counters(self) -> dict[str, int]:
        """Offset of each hop's counter, a line each, and of the abort word."""
        names = (*HOPS, "abort")
        return {name: 128 * index for index, name in enumerate(names)}

    @cached_property
    def exchange(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Offset and shape (4-byte values) of each hop's buffer, from the start of the exchange."""
        g = self.geometry
        shapes: dict[str, tuple[int, ...]] = {
            "qkv": (g.qkv_a_rows,),
            "q": (self.heads, g.qk_head_dim),
            "q_lat": (self.heads, g.kv_lora_rank),
            "partial": (MAX_CTAS, TILE, g.kv_lora_rank),
            "partial_ml": (MAX_CTAS, TILE, 2),
            "latent": (self.heads, g.kv_lora_rank),
            "value": (self.heads, g.v_head_dim),
            "o": (self.ranks, g.hidden_size),
            "route": (g.n_routed_experts,),
            "chosen": (2, g.num_experts_per_tok),
            "act": (self.most_units, BLOCK),
            "down": (self.ranks, g.hidden_size),
            "best": (self.ranks, MAX_CTAS, 2),
        }
        out, offset = {}, 0
        for name, shape in shapes.items():
            out[name] = (offset, shape)
            size = 4
            for length in shape:
                size *= length
            offset += -(-size // 256) * 256
        out["end"] = (offset, ())
        return out

    @property
    def exchange_offset(self) -> int:
        """Where the exchange starts in the workspace."""
        return -(-128 * len(self.counters) // 4096) * 4096

    @property
    def exchange_bytes(self) -> int:
        """Size of one layer's exchange."""
        return self.exchange["end"][0]
