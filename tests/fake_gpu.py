"""What stands in for a GPU: its facts, sidecars and cubins, and a decoder that runs here."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from helpers import make_artifact, make_snapshot
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.manifests.canonical import canonical_json
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.sidecar import Sidecar, parse_sidecar
from dsv2mk.manifests.topology import Topology
from dsv2mk.runner.device import DeviceFacts
from dsv2mk.runner.reference import ReferenceDecoder, greedy
from dsv2mk.runner.world import World

CUBIN = b"\x7fELF and more"

FACTS = DeviceFacts(
    name="Some GPU",
    capability=(9, 0),
    driver=12080,
    multiprocessors=132,
    shared_memory=232_448,
    free_memory=10**12,
)


def facts(**changes: Any) -> DeviceFacts:
    """A device on which `make_sidecar` fits, with some facts changed."""
    return replace(FACTS, **changes)


def make_sidecar(
    geometry: Geometry,
    *,
    arch: str = "sm_90a",
    ranks: int = 1,
    note: str = "",
    cubin: bytes = CUBIN,
    **changes: Any,
) -> Sidecar:
    """A sidecar as the compiler's side writes it, each value made up.

    note: tells kernels of one model apart, as another compiler would.
    """
    key = {
        "arch": arch,
        "fingerprint": {"note": note},
        "geometry": geometry.to_json(),
        "layout_version": 1,
        "scheme": {"name": "any"},
        "sources": {},
        "topology": {"ranks": ranks},
    }
    data = {
        "schema": 1,
        "kernel_key": hashlib.sha256(canonical_json(key)).hexdigest(),
        "key": key,
        "entry": "kernel_0",
        "parameters": [["cache", "u64"], ["rank", "i32"]],
        "arch": arch,
        "block": 640,
        "cluster": 1,
        "cooperative": True,
        "shared_memory": 200_000,
        "static_shared_memory": 1024,
        "registers": 96,
        "local_memory": 0,
        "min_ctas": 3,
        "max_ctas": 256,
        "minimum_driver": 12000,
        "plan": {},
        "cache_row": 88,
        "workspace": {
            "exchange_offset": 512,
            "exchange_bytes": 1024,
            "counters": {},
            "exchange": {"qkv": [0, [6]], "act": [256, [3, 4]]},
            "hops": ["qkv", "q", "route", "down", "best"],
        },
        "phases": ["qkv", "q", "route", "down", "best", "drain"],
        "cubin_sha256": hashlib.sha256(cubin).hexdigest(),
        "ptx_sha256": hashlib.sha256(b"").hexdigest(),
        **changes,
    }
    return parse_sidecar(canonical_json(data), "a sidecar of the tests")


def put_cubin(
    folder: Path, sidecar: Sidecar, *, stem: str | None = None, cubin: bytes = CUBIN, age: int = 0
) -> Path:
    """A cubin beside its sidecar, written `age` seconds ago; the cubin's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem or sidecar.file_stem}.cubin"
    path.write_bytes(cubin)
    path.with_suffix(".json").write_bytes(sidecar.encoded + b"\n")
    for one in (path, path.with_suffix(".json")):
        os.utime(one, (1_700_000_000 - age,) * 2)
    return path


# ---- what a kernel would leave ----


def nearly_tied(folder: Path, name: str, order: list[int], config: dict[str, Any]) -> Artifact:
    """An artifact whose routers' rows differ only by `order` times 2^-20, as rounding would."""
    snapshot = make_snapshot(folder / f"snapshot-{name}", config)
    weights = load_file(snapshot / "model.safetensors")
    for key, router in weights.items():
        if key.endswith("mlp.gate.weight"):
            router[:] = router[0]
            router[:, -1] = torch.tensor(order) * 2.0**-20
    save_file(weights, snapshot / "model.safetensors")
    return make_artifact(snapshot, 1, folder / name)


def exchange_of(
    geometry: Geometry, topology: Topology, trace: dict[Any, Tensor]
) -> dict[tuple[str, int], Tensor]:
    """Each hop's buffer of each layer in 4-byte words, from what the reference left: rank 0's.

    Units at work: all of a dense layer; else the shared ones, then those of the chosen experts.
    What no unit has written is NaN.
    """
    out: dict[tuple[str, int], Tensor] = {}
    for (layer, phase), value in trace.items():
        if not phase.startswith(("act", "chosen")):
            out[phase, layer] = value.clone()
    for layer in range(geometry.num_hidden_layers):
        units = list(range(geometry.layer_units(layer)))
        if not geometry.is_dense(layer):
            numbers, weights = trace[layer, "chosen"]
            experts = numbers.to(torch.int32)
            out["chosen", layer] = torch.stack([experts.view(torch.float32), weights])
            units = units[geometry.routed_units :]
            for expert in experts.tolist():
                first = expert * geometry.expert_units
                units += range(first, first + geometry.expert_units)
        units = [unit for unit in units if topology.unit_rank(unit) == 0]
        out["act", layer] = torch.full((len(units) + 3, 128), torch.nan)
        for place, unit in enumerate(units):
            out["act", layer][place] = trace[layer, f"act {unit}"]
    return out


class FakeDecoder:
    """The calls of a GpuDecoder, served by the reference decoder.

    logits_of: what becomes of the logits of a position; spoil: changes a step's exchange;
    choices_of: a position's experts, layer by layer, where they are not the reference's own.
    """

    def __init__(
        self,
        artifact: Artifact,
        logits_of: Callable[[int, Tensor], Tensor] = lambda position, logits: logits,
        spoil: Callable[[int, dict[tuple[str, int], Tensor]], None] = lambda position, words: None,
        choices_of: Callable[[int], dict[int, list[int]]] = lambda position: {},
    ) -> None:
        self.artifact = artifact
        self.sidecar = make_sidecar(artifact.manifest.geometry)
        self.ctas = 7
        self.world = World()
        self.errors: list[BaseException | None] = []  # that it was left with
        self.cache = torch.zeros(1)
        self.position = 0
        self.logits = torch.zeros(1)
        self.noises: list[int | None] = []
        self.launches: list[int] = []
        self._logits_of, self._spoil, self._choices_of = logits_of, spoil, choices_of
        self._words: dict[tuple[str, int], Tensor] = {}

    def __enter__(self) -> "FakeDecoder":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.errors.append(error)

    def follow(self) -> bool:
        return False

    def ranks_differ(self) -> str | None:
        return None

    def reset(self, noise: int | None = None) -> None:
        self.noises.append(noise)
        self.position = self._known = 0
        self._row: dict[int, int] = {}
        self._reference = ReferenceDecoder(self.artifact)
        self._reference.trace = {}

    def place(self, tokens: list[int]) -> None:
        self._known = self.position + len(tokens)
        self._row |= dict(zip(range(self.position, self._known), tokens, strict=True))

    def run(self, steps: int) -> None:
        self.launches.append(steps)
        for _ in range(steps):
            choices = self._choices_of(self.position)
            logits = self._reference.step(self._row[self.position], choices)
            # One buffer, as on a device: whoever wants to keep logits has to copy them.
            self.logits.resize_(logits.shape).copy_(self._logits_of(self.position, logits))
            assert self._reference.trace is not None
            manifest = self.artifact.manifest
            self._words = exchange_of(manifest.geometry, manifest.topology, self._reference.trace)
            self._spoil(self.position, self._words)
            self.position += 1
            if self.position >= self._known:
                self._row[self.position] = greedy(self.logits)

    def feed(self, tokens: list[int]) -> None:
        self.place(tokens)
        self.run(len(tokens))

    def step(self, token: int) -> Tensor:
        self.feed([token])
        return self.logits

    def tokens(self, start: int, end: int) -> list[int]:
        return [self._row[position] for position in range(start, end)]

    def exchange(self, name: str, layer: int) -> Tensor:
        return self._words[name, layer]
