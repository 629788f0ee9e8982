"""The PTX instructions that the kernel is made of, one thin function each.

Addresses are plain integers: Int64 into global memory, Int32 into the CTA's shared memory.
Everything here is volatile to the compiler in front of ptxas, so program order is kept.
"""

import struct

from cutlass import Float32, Float64, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.arch import globaltimer, inline_ptx

# ---- shared memory ----


def lds(addr):
    """One 32-bit word."""
    return _one("ld.shared.b32 {$w0}, [{$r0}];", Int32, addr)


def lds_f32(addr):
    """One fp32."""
    return _one("ld.shared.f32 {$w0}, [{$r0}];", Float32, addr)


def lds_f64(addr):
    """One fp64."""
    return _one("ld.shared.f64 {$w0}, [{$r0}];", Float64, addr)


def lds_volatile(addr):
    """One 32-bit word that another warp may be writing."""
    return _one("ld.volatile.shared.b32 {$w0}, [{$r0}];", Int32, addr)


def lds_acquire(addr):
    """One 32-bit word, before everything that this thread does next."""
    return _one("ld.acquire.cta.shared.b32 {$w0}, [{$r0}];", Int32, addr)


def sts_release(addr, value):
    """Store one 32-bit word, after everything that this thread has done."""
    inline_ptx("st.release.cta.shared.b32 [{$r0}], {$r1};", read_only_args=[addr, value])


def lds2(addr):
    """Two 32-bit words; 8-byte aligned."""
    return _many("ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", Int32, 2, addr)


def lds4(addr):
    """Four 32-bit words; 16-byte aligned."""
    return _many("ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", Int32, 4, addr)


def lds4_f32(addr):
    """Four fp32; 16-byte aligned."""
    return _many("ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", Float32, 4, addr)


def sts(addr, value):
    """Store one 32-bit word."""
    inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[addr, value])


def sts_f32(addr, value):
    """Store one fp32."""
    inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[addr, value])


def sts_f64(addr, value: float):
    """Store one fp64 constant."""
    word = int.from_bytes(struct.pack("<d", value), "little", signed=True)
    inline_ptx("st.shared.b64 [{$r0}], {$r1};", read_only_args=[addr, Int64(word)])


def sts2_f32(addr, a, b):
    """Store two fp32; 8-byte aligned."""
    inline_ptx("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[addr, a, b])


def sts2(addr, a, b):
    """Store two 32-bit words; 8-byte aligned."""
    inline_ptx("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[addr, a, b])


def sts4(addr, a, b, c, d):
    """Store four 32-bit words; 16-byte aligned."""
    inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[addr, a, b, c, d],
    )


# ---- global memory ----
# Exchanged values are read with `ld.relaxed.gpu`: never from this SM's L1.


def ldg(addr):
    """One 32-bit word of read-only data."""
    return _one("ld.global.b32 {$w0}, [{$r0}];", Int32, addr)


def ld_relaxed(addr):
    """One 32-bit word that another CTA wrote."""
    return _one("ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];", Int32, addr)


def ld_f32(addr):
    """One fp32 that another CTA wrote."""
    return _one("ld.relaxed.gpu.global.f32 {$w0}, [{$r0}];", Float32, addr)


def ld2_f32(addr):
    """Two fp32 that another CTA wrote; 8-byte aligned."""
    return _many("ld.relaxed.gpu.global.v2.f32 {{$w0}, {$w1}}, [{$r0}];", Float32, 2, addr)


def ld4_f32(addr):
    """Four fp32 that another CTA wrote; 16-byte aligned."""
    return _many(
        "ld.relaxed.gpu.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", Float32, 4, addr
    )


def stg(addr, value):
    """Store one 32-bit word."""
    inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[addr, value])


def stg_f32(addr, value):
    """Store one fp32."""
    inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[addr, value])


def stg2_f32(addr, a, b):
    """Store two fp32; 8-byte aligned."""
    inline_ptx("st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[addr, a, b])


def stg_64(addr, value):
    """Store one 64-bit word."""
    inline_ptx("st.global.b64 [{$r0}], {$r1};", read_only_args=[addr, value])


def st_system(addr, value):
    """Store one 32-bit word for the host to see."""
    inline_ptx("st.relaxed.sys.global.b32 [{$r0}], {$r1};", read_only_args=[addr, value])


def red_release(addr, value):
    """Add to a counter of this GPU after everything that this thread has seen."""
    inline_ptx("red.release.gpu.global.add.u32 [{$r0}], {$r1};", read_only_args=[addr, value])


def red_relaxed_system(addr, value):
    """Add to a counter of any GPU; a fence before it orders it."""
    inline_ptx("red.relaxed.sys.global.add.u32 [{$r0}], {$r1};", read_only_args=[addr, value])


def multimem_st_f32(addr, value):
    """Store one fp32 at a multicast address: in the memory of every rank."""
    inline_ptx("multimem.st.weak.global.f32 [{$r0}], {$r1};", read_only_args=[addr, value])


def multimem_st2_f32(addr, a, b):
    """Store two fp32 at a multicast address; 8-byte aligned."""
    inline_ptx(
        "multimem.st.weak.global.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[addr, a, b]
    )


def multimem_red_release(addr, value):
    """`red_release` at a multicast address: to the counter of every rank."""
    inline_ptx(
        "multimem.red.release.sys.global.add.u32 [{$r0}], {$r1};", read_only_args=[addr, value]
    )


def ld_acquire(addr, scope):
    """Read a counter before everything that this thread does next. scope: gpu or sys."""
    return _one(f"ld.acquire.{scope}.global.b32 {{$w0}}, [{{$r0}}];", Int32, addr)


def ldg_64(addr):
    """One 64-bit word of read-only data."""
    return _one("ld.global.b64 {$w0}, [{$r0}];", Int64, addr)


def claim(addr):
    """Set a zero word to one; its value before."""
    return _one("atom.relaxed.gpu.global.cas.b32 {$w0}, [{$r0}], 0, 1;", Int32, addr)


def fence_system():
    """Order this thread's accesses for the whole system."""
    inline_ptx("fence.acq_rel.sys;")


def fence_alias():
    """Order accesses to one memory through different addresses."""
    inline_ptx("fence.proxy.alias;")


def fence_async():
    """Order ordinary accesses before those of the copy engine."""
    inline_ptx("fence.proxy.async;")


# ---- mbarriers and bulk copies ----


def mbarrier_init(addr, count):
    """A barrier whose phase takes `count` arrivals."""
    inline_ptx("mbarrier.init.shared.b64 [{$r0}], {$r1};", read_only_args=[addr, count])


def mbarrier_init_fence():
    """Make initialised barriers known to the copy engine."""
    inline_ptx("fence.mbarrier_init.release.cluster;")


def mbarrier_arrive(addr):
    """Arrive; releases what this thread has done."""
    inline_ptx("mbarrier.arrive.shared.b64 _, [{$r0}];", read_only_args=[addr])


def mbarrier_expect(addr, count):
    """Arrive and expect `count` bytes of copies."""
    inline_ptx(
        "mbarrier.arrive.expect_tx.shared.b64 _, [{$r0}], {$r1};", read_only_args=[addr, count]
    )


def mbarrier_try(addr, parity):
    """1 if the phase of this parity is complete; waits for a short while that hardware sets."""
    return _one(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1};"
        " selp.b32 {$w0}, 1, 0, p; }",
        Int32,
        addr,
        parity,
    )


def stream_policy():
    """L2 policy of weights: the first to leave, since a token reads them once."""
    return _one("createpolicy.fractional.L2::evict_first.b64 {$w0}, 1.0;", Int64)


def bulk_copy(dst, src, count, bar, policy):
    """Copy `count` bytes (all 16-byte aligned) from global to shared memory, counted on `bar`."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
        read_only_args=[dst, src, count, bar, policy],
    )


# ---- arithmetic ----


def fma(a, b, c):
    """a * b + c, rounded once."""
    return _one("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", Float32, a, b, c)


def bf16_low(word):
    """Lower bf16 of a word as fp32."""
    return _one("{ .reg .b32 t; shl.b32 t, {$r0}, 16; mov.b32 {$w0}, t; }", Float32, word)


def bf16_high(word):
    """Upper bf16 of a word as fp32."""
    return _one("{ .reg .b32 t; and.b32 t, {$r0}, 0xffff0000; mov.b32 {$w0}, t; }", Float32, word)


def e4m3_to_f16(word):
    """Four E4M3 bytes, lowest first, as two words of two fp16 (exact)."""
    return _many(
        "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0};"
        " cvt.rn.f16x2.e4m3x2 {$w0}, l; cvt.rn.f16x2.e4m3x2 {$w1}, h; }",
        Int32,
        2,
        word,
    )


def pack_f16(low, high):
    """Two fp32 rounded to fp16, in one word."""
    return _one("cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};", Int32, low, high)


def unpack_f16(word):
    """Two fp16 of a word as fp32, the lower one first."""
    return _many(
        "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }",
        Float32,
        2,
        word,
    )


def pack_bf16(low, high):
    """Two fp32 rounded to bf16, in one word."""
    return _one("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", Int32, low, high)


def exp2(x):
    """2^x, about 2 ulp."""
    return _one("ex2.approx.f32 {$w0}, {$r0};", Float32, x)


def rsqrt(x):
    """x^-1/2, about 1 ulp."""
    return _one("rsqrt.approx.f32 {$w0}, {$r0};", Float32, x)


def divide(a, b):
    """a / b, within 2 ulp."""
    return _one("div.full.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def cos(x):
    """cos of |x| <= pi, absolute error below 2^-20."""
    return _one("cos.approx.f32 {$w0}, {$r0};", Float32, x)


def sin(x):
    """sin of |x| <= pi, absolute error below 2^-20."""
    return _one("sin.approx.f32 {$w0}, {$r0};", Float32, x)


def absolute(x):
    """|x|."""
    return _one("abs.f32 {$w0}, {$r0};", Float32, x)


def maximum(a, b):
    """Larger of two fp32; a NaN loses."""
    return _one("max.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def turn_fraction(turns):
    """fp64 turns, less the nearest whole number, as fp32 in [-0.5, 0.5]."""
    return _one(
        "{ .reg .f64 a, b; cvt.rni.f64.f64 a, {$r0}; sub.f64 b, {$r0}, a;"
        " cvt.rn.f32.f64 {$w0}, b; }",
        Float32,
        turns,
    )


def bits(x):
    """The word of an fp32."""
    return _one("mov.b32 {$w0}, {$r0};", Int32, x)


def as_f32(x):
    """The fp32 of a word."""
    return _one("mov.b32 {$w0}, {$r0};", Float32, x)


# ---- warp ----


def shuffle_xor(x, lane_mask):
    """The fp32 of the lane whose index differs in the mask's bits."""
    return _one(f"shfl.sync.bfly.b32 {{$w0}}, {{$r0}}, {lane_mask}, 31, -1;", Float32, x)


def warp_max_u32(x):
    """Largest word of the warp, unsigned."""
    return _one("redux.sync.max.u32 {$w0}, {$r0}, -1;", Int32, x)


def warp_min_u32(x):
    """Smallest word of the warp, unsigned."""
    return _one("redux.sync.min.u32 {$w0}, {$r0}, -1;", Int32, x)


def ballot(flag):
    """Bit mask of the lanes whose word is not zero."""
    return _one(
        "{ .reg .pred p; setp.ne.b32 p, {$r0}, 0; vote.sync.ballot.b32 {$w0}, p, -1; }", Int32, flag
    )


def popcount(x):
    """Number of bits that are set."""
    return _one("popc.b32 {$w0}, {$r0};", Int32, x)


def renew(x):
    """The same word, of which the compiler knows nothing: it keeps nothing derived from it."""
    return _one("mov.b32 {$w0}, {$r0};", Int32, x)


def special(name):
    """A special register, read anew. (`inline_ptx` cannot name one.)"""
    code = f"mov.u32 $0, %{name};"
    return Int32(llvm.inline_asm(Int32.mlir_type, [], code, "=r", has_side_effects=True))


def sync_warp():
    """All lanes meet, and see what each has written."""
    inline_ptx("bar.warp.sync -1;")


def barrier(index, threads):
    """Named barrier of the CTA."""
    inline_ptx(f"barrier.sync {index}, {threads};")


def more_registers(count):
    """The warpgroup takes registers that another has given up; all of its warps together."""
    inline_ptx(f"setmaxnreg.inc.sync.aligned.u32 {count};")


def fewer_registers(count):
    """The warpgroup gives up registers; all of its warps together."""
    inline_ptx(f"setmaxnreg.dec.sync.aligned.u32 {count};")


def sleep(nanoseconds):
    """Let the warp rest for about this long."""
    inline_ptx(f"nanosleep.u32 {nanoseconds};")


def now():
    """Nanoseconds of the global timer."""
    return Int64(globaltimer())


# ---- tensor cores ----


def ldmatrix(addr):
    """Four 8 x 8 matrices of bf16; lane l gives the address of row l % 8 of matrix l / 8."""
    return _many(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        Int32,
        4,
        addr,
    )


def ldmatrix_transposed(addr):
    """`ldmatrix`, each matrix transposed."""
    return _many(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        Int32,
        4,
        addr,
    )


def mma_k16(c, a, b0, b1):
    """c[16, 8] += a[16, 16] @ b[16, 8] in bf16 with fp32 sums; c, a: the lane's 4 registers."""
    return _many(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}},"
        " {{$r4}, {$r5}, {$r6}, {$r7}}, {{$r8}, {$r9}}, {{$r0}, {$r1}, {$r2}, {$r3}};",
        Float32,
        4,
        *c,
        *a,
        b0,
        b1,
    )


def mma_f16(c, a, b0, b1):
    """`mma_k16` in fp16."""
    return _many(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$w0}, {$w1}, {$w2}, {$w3}},"
        " {{$r4}, {$r5}, {$r6}, {$r7}}, {{$r8}, {$r9}}, {{$r0}, {$r1}, {$r2}, {$r3}};",
        Float32,
        4,
        *c,
        *a,
        b0,
        b1,
    )


def mma_k8(c, a0, a1, b):
    """c[16, 8] += a[16, 8] @ b[8, 8] in bf16 with fp32 sums."""
    return _many(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}},"
        " {{$r4}, {$r5}}, {{$r6}}, {{$r0}, {$r1}, {$r2}, {$r3}};",
        Float32,
        4,
        *c,
        a0,
        a1,
        b,
    )


def _one(code, kind, *args):
    return inline_ptx(code, write_only_types=[kind], read_only_args=list(args))


def _many(code, kind, count, *args):
    return list(inline_ptx(code, write_only_types=[kind] * count, read_only_args=list(args)))
