"""The kernel key: everything that decides a cubin's bytes, and nothing else. No compiler needed.

Sources are hashed whole: all modules of this package and those of `manifests`, so that an edited
helper is never missed. The toolchain is that of the wheels: their versions, and the digest that pip
recorded of every file of theirs (RECORD), wherever they are installed.
"""

import hashlib
import platform
from functools import cache
from importlib import metadata, resources
from typing import Any

from dsv2mk.manifests.canonical import canonical_json
from dsv2mk.manifests.errors import InputError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.layout import LAYOUT_VERSION
from dsv2mk.manifests.scheme import SCHEME
from dsv2mk.manifests.topology import Topology

#: Architectures that the kernel is compiled for; the least driver whose ptxas-made code they run.
ARCHS = {"sm_90a": 12000, "sm_100a": 12080, "sm_103a": 12090}

_WHEELS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
)


def make_key(
    geometry: Geometry, topology: Topology, arch: str, collective: str = "p2p"
) -> dict[str, Any]:
    """What decides the bytes of a cubin. Raises InputError without the compiler's wheels."""
    return {
        "arch": arch,
        "fingerprint": fingerprint(),
        "geometry": geometry.to_json(),
        "layout_version": LAYOUT_VERSION,
        "options": {"collective": collective},
        "scheme": SCHEME,
        "sources": sources(),
        "topology": {"ranks": topology.ranks},
    }


def key_digest(key: dict[str, Any]) -> str:
    """The kernel key: sha256 of the canonical JSON, hex."""
    return hashlib.sha256(canonical_json(key)).hexdigest()


@cache
def fingerprint() -> dict[str, str]:
    """Versions of Python and of the compiler's wheels, and hashes of what was installed."""
    out = {"python": ".".join(platform.python_version_tuple()[:2]), "machine": platform.machine()}
    for name in _WHEELS:
        try:
            wheel = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise InputError(
                f"the compiler is not installed: no package {name}",
                fix="pip install 'dsv2mk[build]'",
            ) from None
        record = "\n".join(
            sorted(
                line
                for line in (wheel.read_text("RECORD") or "").splitlines()
                if not line.startswith(("../", "bin/"))  # programs: they begin with Python's path
                and "__pycache__" not in line
                and ".dist-info" not in line
            )
        )
        digest = hashlib.sha256(record.encode()).hexdigest()
        out[name] = f"{wheel.version} {digest[:16]}"
    return out


@cache
def sources() -> dict[str, str]:
    """sha256 of each module that the kernel is traced from."""
    out = {}
    for package in ("kernel", "manifests"):
        for entry in resources.files(f"dsv2mk.{package}").iterdir():
            if entry.name.endswith(".py"):
                out[f"{package}/{entry.name}"] = hashlib.sha256(entry.read_bytes()).hexdigest()
    return out
