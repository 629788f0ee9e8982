"""Compiled kernels on disk, named by their kernel key: a second compile is a lookup.

A folder a key, with cubin, PTX and sidecar. It is made beside its final name and renamed, so that
an entry is whole or absent; of several processes that compile the same key the first rename wins,
and the others use its bytes, which are the same. An entry is checked against its hashes whenever it
is used, and made again if it does not hold what it should.
"""

import os
import shutil
import tempfile
from pathlib import Path

from dsv2mk.kernel.compile import (
    Compiled,
    compile_in_process,
    make_sidecar,
    refuse_local_memory,
)
from dsv2mk.kernel.key import key_digest, make_key
from dsv2mk.kernel.plan import Plan
from dsv2mk.manifests.errors import ArtifactError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.sidecar import cache_folder, parse_sidecar
from dsv2mk.manifests.topology import Topology


def get_compiled(
    geometry: Geometry,
    topology: Topology,
    arch: str,
    *,
    collective: str = "p2p",
    allow_local_memory: bool = False,
) -> tuple[Compiled, bool]:
    """A kernel from the cache, compiled first if it is not there; and whether it was there.

    With CUTE_DSL_KEEP set it is compiled anyway: the compiler is asked to leave files.
    """
    key = key_digest(make_key(geometry, topology, arch, collective))
    folder = cache_folder() / key
    found = None if os.environ.get("CUTE_DSL_KEEP") else _read(folder, key)
    if found is not None:
        if not allow_local_memory:
            refuse_local_memory(found.sidecar)
        return found, True
    made = compile_in_process(
        geometry, topology, arch, collective=collective, allow_local_memory=allow_local_memory
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{key[:16]}.", dir=folder.parent))
    try:
        temporary.chmod(0o777 & ~_umask())
        write_compiled(temporary, "kernel", made)
        for _ in range(2):
            try:
                os.rename(temporary, folder)
                break
            except OSError:
                if _read(folder, key) is not None:
                    break  # another process was first
                if folder.is_dir() and not folder.is_symlink():
                    shutil.rmtree(folder, ignore_errors=True)  # damaged
                else:
                    folder.unlink(missing_ok=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return made, False


def write_compiled(folder: Path, stem: str, compiled: Compiled) -> list[Path]:
    """Write cubin, PTX and sidecar, the sidecar last; each is whole or absent."""
    parts = {
        "cubin": compiled.cubin,
        "ptx": compiled.ptx,
        "json": compiled.sidecar.encoded + b"\n",
    }
    written = []
    for suffix, data in parts.items():
        path = folder / f"{stem}.{suffix}"
        temporary = folder / f".{stem}.{suffix}.{os.getpid()}"
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        written.append(path)
    return written


def _read(folder: Path, key: str) -> Compiled | None:
    """A whole entry, or None."""
    try:
        sidecar = parse_sidecar((folder / "kernel.json").read_bytes(), folder)
        cubin, ptx = (folder / "kernel.cubin").read_bytes(), (folder / "kernel.ptx").read_bytes()
    except (OSError, ArtifactError):
        return None
    if sidecar.data["kernel_key"] != key or not sidecar.matches(cubin):
        return None
    plan = Plan(geometry=sidecar.geometry, topology=sidecar.topology, collective=sidecar.collective)
    made = make_sidecar(plan, sidecar.data["key"], sidecar.data["entry"], cubin, ptx)
    if made.encoded != sidecar.encoded:
        return None
    return Compiled(cubin=cubin, ptx=ptx, sidecar=sidecar)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
