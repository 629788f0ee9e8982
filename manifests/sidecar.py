"""The sidecar: the JSON beside a cubin that tells the runner all that it needs to launch it.

The runner imports neither the compiler nor `dsv2mk.kernel`: parameters, memory to lay out and needs
of the launch stand here. Canonical JSON, so that equal kernels have equal sidecars.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dsv2mk.manifests.canonical import canonical_json, parse_object
from dsv2mk.manifests.errors import ArtifactError, InputError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.layout import LAYOUT_VERSION
from dsv2mk.manifests.topology import Topology

SIDECAR_SCHEMA = 1
#: How ranks hand each other their shares: a store to each peer, or one to a multicast address.
#: The first is what a kernel does whose key does not say.
COLLECTIVES = ("p2p", "multimem")
#: Folder of an artifact that its cubins are in, and their files.
CUBIN_FOLDER = "cubin"
CUBIN_FILE = re.compile(r"dsv2mk\.[A-Za-z0-9_.]+\.(cubin|ptx|json)")

_FIELDS: dict[str, type] = {
    "schema": int,
    "kernel_key": str,  # sha256 of `key`
    "key": dict,  # everything that decides the cubin's bytes
    "entry": str,
    "parameters": list,  # [name, type] in order
    "arch": str,
    "block": int,  # threads
    "cluster": int,  # CTAs
    "cooperative": bool,
    "shared_memory": int,  # dynamic, bytes
    "static_shared_memory": int,
    "registers": int,  # a thread is launched with
    "local_memory": int,  # bytes a thread: spills, and arrays that are not in registers
    "min_ctas": int,
    "max_ctas": int,
    "minimum_driver": int,  # as cuDriverGetVersion counts
    "plan": dict,  # constants compiled in
    "cache_row": int,  # bf16 of a token's row of the latent cache
    "workspace": dict,  # bytes, exchange_offset, exchange_bytes, counters, exchange
    "phases": list,
    "cubin_sha256": str,
    "ptx_sha256": str,
}


@dataclass(kw_only=True, frozen=True)
class Sidecar:
    """A sidecar that has been checked."""

    data: Mapping[str, Any]
    geometry: Geometry
    topology: Topology
    collective: str = COLLECTIVES[0]

    def __getattr__(self, name: str) -> Any:
        if name == "data" or name not in self.data:  # while it is being copied there is no data
            raise AttributeError(name)
        return self.data[name]

    @cached_property
    def encoded(self) -> bytes:
        """The canonical bytes."""
        return canonical_json(self.data)

    @property
    def file_stem(self) -> str:
        """Name of the cubin's files, without what follows the last dot."""
        start = f"dsv2mk.{self.data['arch']}.tp{self.topology.ranks}"
        if self.collective != COLLECTIVES[0]:
            start += f".{self.collective}"
        return f"{start}.{self.data['kernel_key'][:16]}"

    def matches(self, cubin: bytes) -> bool:
        """Whether these are the bytes that the sidecar describes."""
        wanted: str = self.data["cubin_sha256"]
        return hashlib.sha256(cubin).hexdigest() == wanted


def cache_folder() -> Path:
    """Where compiled kernels are kept: $DSV2MK_CUBIN_CACHE, or ~/.cache/dsv2mk/cubin."""
    given = os.environ.get("DSV2MK_CUBIN_CACHE")
    if given:
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "dsv2mk" / "cubin"


def parse_sidecar(encoded: bytes, where: object) -> Sidecar:
    """Read a sidecar. Raises ArtifactError naming `where`."""
    fix = "Compile it again: dsv2mk cubin --artifact DIR --arch ARCH"
    try:
        data = parse_object(encoded)
    except ValueError as error:
        raise ArtifactError(f"{where} is {error}", fix=fix) from None
    if data.get("schema") != SIDECAR_SCHEMA:
        raise ArtifactError(
            f"{where}: schema", expected=SIDECAR_SCHEMA, found=data.get("schema"), fix=fix
        )
    for name, kind in _FIELDS.items():
        if type(data.get(name)) is not kind:
            raise ArtifactError(f"{where}: {name} is missing or of another type", fix=fix)
    try:
        canonical_json(data)  # no floats
        key = data["key"]
        geometry = Geometry.from_json(key["geometry"])
        topology = Topology(ranks=key["topology"]["ranks"])
        topology.check(geometry)
        collective = key.get("options", {}).get("collective", COLLECTIVES[0])
        if collective not in COLLECTIVES or (collective == "multimem" and topology.ranks == 1):
            raise ValueError("collective")
        same = hashlib.sha256(canonical_json(key)).hexdigest() == data["kernel_key"]
        if not same or key["layout_version"] != LAYOUT_VERSION or key["arch"] != data["arch"]:
            raise ValueError("kernel key")
    except (ValueError, KeyError, TypeError, AttributeError, InputError) as error:
        raise ArtifactError(f"{where} is damaged: {error}", fix=fix) from None
    return Sidecar(data=data, geometry=geometry, topology=topology, collective=collective)
