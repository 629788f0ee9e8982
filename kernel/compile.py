"""Trace and compile one kernel. Run as `python -m dsv2mk.kernel.compile`, a process an arch.

The compiler takes its target from the environment and is not safe to use from several threads, so
a compile is a process of its own: it reads a request on stdin and leaves cubin, PTX and sidecar in
a folder. `compile_in_process` starts it.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from dsv2mk.kernel.elf import resources
from dsv2mk.kernel.key import ARCHS, key_digest, make_key
from dsv2mk.kernel.plan import HOPS, MAX_CTAS, PHASES, THREADS, Plan
from dsv2mk.manifests.canonical import canonical_json
from dsv2mk.manifests.errors import InputError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.sidecar import SIDECAR_SCHEMA, Sidecar, parse_sidecar
from dsv2mk.manifests.topology import Topology

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
#: What a name of the entry starts with. Never "cutlass": ptxas spills on sm_100a with that in it.
_NAME = "dsv2mk"


@dataclass(kw_only=True, slots=True, frozen=True)
class Compiled:
    """A compiled kernel, in memory."""

    cubin: bytes
    ptx: bytes
    sidecar: Sidecar


def compile_in_process(
    geometry: Geometry,
    topology: Topology,
    arch: str,
    *,
    collective: str = "p2p",
    allow_local_memory: bool = False,
) -> Compiled:
    """Compile in a process of its own.

    Of the compiler's environment variables only CUTE_DSL_KEEP and CUTE_DSL_DUMP_DIR count: others
    decide the bytes, and are no part of the kernel key.

    Raises InputError if the kernel does not support the geometry, or if it uses local memory
    (spilled registers) and `allow_local_memory` is not set.
    """
    # Refuses here, with the caller's messages.
    plan = Plan(geometry=geometry, topology=topology, collective=collective)
    key = make_key(geometry, topology, arch, collective)
    request = {
        "geometry": geometry.to_json(),
        "ranks": topology.ranks,
        "arch": arch,
        "collective": collective,
    }
    with tempfile.TemporaryDirectory(prefix="dsv2mk-cubin-") as folder:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")
        }
        environment["CUTE_DSL_ARCH"] = arch
        kept = {word for word in os.environ.get("CUTE_DSL_KEEP", "").split(",") if word}
        environment["CUTE_DSL_KEEP"] = ",".join(sorted(kept | {"ptx", "cubin"}))
        if kept:
            dump = Path(os.environ.get("CUTE_DSL_DUMP_DIR") or os.getcwd())
            dump.mkdir(parents=True, exist_ok=True)
            environment["CUTE_DSL_DUMP_DIR"] = str(dump)
        else:  # nobody asked for files: the compiler's own go with the folder
            environment["CUTE_DSL_DUMP_DIR"] = folder
        result = subprocess.run(
            [sys.executable, "-P", "-m", "dsv2mk.kernel.compile", folder],
            input=json.dumps(request),
            env=environment,
            capture_output=True,
            text=True,
        )
        if result.returncode:
            raise RuntimeError(f"the compiler failed:\n{result.stdout}{result.stderr}")
        made = Path(folder)
        cubin, ptx = (made / "out.cubin").read_bytes(), (made / "out.ptx").read_bytes()
        entry = (made / "out.entry").read_text()
    sidecar = make_sidecar(plan, key, entry, cubin, ptx)
    if not allow_local_memory:
        refuse_local_memory(sidecar)
    return Compiled(cubin=cubin, ptx=ptx, sidecar=sidecar)


def refuse_local_memory(sidecar: Sidecar) -> None:
    """Raise InputError if a kernel uses local memory."""
    local = sidecar.data["local_memory"]
    if local:
        raise InputError(
            f"the kernel for {sidecar.data['arch']} uses local memory (spilled registers)",
            expected="0 bytes a thread",
            found=local,
            fix="--allow-local-memory compiles it all the same; it will be slower",
        )


def make_sidecar(plan: Plan, key: dict[str, Any], entry: str, cubin: bytes, ptx: bytes) -> Sidecar:
    """Describe a cubin."""
    from dsv2mk.kernel.parameters import PARAMETERS

    used = resources(cubin)
    matrices = ("qkv_a", "q_b", "w_uk", "w_uv", "o", "router", "gate_up", "lm_head")
    data = {
        "schema": SIDECAR_SCHEMA,
        "kernel_key": key_digest(key),
        "key": key,
        "entry": entry,
        "parameters": [list(parameter) for parameter in PARAMETERS],
        "arch": key["arch"],
        "block": THREADS,
        "cluster": 1,
        "cooperative": True,
        "shared_memory": plan.smem_bytes,
        "static_shared_memory": used.static_shared_memory,
        "registers": used.registers,
        "local_memory": used.local_memory,
        "min_ctas": plan.min_ctas,
        "max_ctas": MAX_CTAS,
        "minimum_driver": ARCHS[key["arch"]],
        "plan": {
            "slot": plan.slot,
            "slots": plan.slots,
            "scale_bytes": plan.scale_bytes,
            "smem": plan.smem,
            "down": {"rows": plan.down_rows, "units": plan.down_units},
            "matrices": {
                name: {
                    "rows": matrix.rows,
                    "row_bytes": matrix.row_bytes,
                    "chunk_rows": matrix.chunk_rows,
                    "pieces": matrix.pieces,
                    "window": matrix.window,
                }
                for name in matrices
                if (matrix := getattr(plan, name)).rows
            },
        },
        "cache_row": plan.cache_row,
        "workspace": {
            "exchange_offset": plan.exchange_offset,
            "exchange_bytes": plan.exchange_bytes,
            "counters": plan.counters,
            "exchange": {
                name: [offset, list(shape)] for name, (offset, shape) in plan.exchange.items()
            },
            "hops": list(HOPS),
        },
        "phases": list(PHASES),
        "cubin_sha256": sha256(cubin).hexdigest(),
        "ptx_sha256": sha256(ptx).hexdigest(),
    }
    return parse_sidecar(canonical_json(data), "the new sidecar")


def _main(folder: Path) -> None:
    with suppress(OSError, AttributeError):  # Linux: do not outlive who asked
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    request = json.load(sys.stdin)
    import cutlass.cute as cute
    from cutlass import Int32, Int64

    from dsv2mk.kernel.decode import make_host
    from dsv2mk.kernel.parameters import PARAMETERS

    plan = Plan(
        geometry=Geometry.from_json(request["geometry"]),
        topology=Topology(ranks=request["ranks"]),
        collective=request["collective"],
    )
    zeros = [Int32(0) if kind == "i32" else Int64(0) for _, kind in PARAMETERS]
    compiled = cute.compile(make_host(plan, _NAME), *zeros, Int32(1))
    (entry,) = compiled.kernel_info
    (folder / "out.cubin").write_bytes(compiled.artifacts.CUBIN)
    (folder / "out.ptx").write_text(compiled.artifacts.PTX)
    (folder / "out.entry").write_text(entry)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
