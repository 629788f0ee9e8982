"""From a command line to a decoder on a GPU: what every GPU command shares."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from dsv2mk.artifacts.artifact import SAMPLE, Artifact
from dsv2mk.artifacts.console import progress
from dsv2mk.manifests.errors import ArtifactError, UsageError

_PATH = click.Path(path_type=Path)


@dataclass(kw_only=True, slots=True, frozen=True)
class GpuOptions:
    """How to get a decoder onto a GPU, as given on the command line."""

    cubin: Path | None
    context: int | None
    ctas: int
    timeout: float
    verify: str
    collective: str = "p2p"
    loopback: int | None = None
    trust: tuple[Path, ...] = ()
    #: What opening a decoder took, by `open_gpu`: seconds of device, cubin_load, verify, copy.
    start_up: dict[str, float] = field(default_factory=dict)


def _finite(_: object, __: object, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a number of seconds")
    return value


def backend_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--backend`."""
    return click.option(
        "--backend",
        type=click.Choice(["auto", "gpu", "reference"]),
        default="auto",
        show_default=True,
        help="auto: gpu where there is one.",
    )(function)


def gpu_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of GpuOptions, each a parameter of the command."""
    options = [
        click.option("--cubin", type=_PATH, metavar="DIR|FILE", help="Where the cubin is."),
        click.option(
            "--context", type=click.IntRange(1), help="Tokens that the cache has room for."
        ),
        click.option("--ctas", type=click.IntRange(0), default=0, help="CTAs; 0: one an SM."),
        click.option(
            "--timeout",
            type=click.FloatRange(0.001, 1800),
            callback=_finite,
            default=10.0,
            show_default=True,
            help="Seconds that a wait inside the kernel may take.",
        ),
        click.option(
            "--verify",
            type=click.Choice(["none", "sample", "full"]),
            default="sample",
            show_default=True,
            help="Which 64 MiB chunks to hash as they are loaded; sample: 5 % of each file's.",
        ),
        click.option(
            "--collective",
            type=click.Choice(["p2p", "multimem"]),
            default="p2p",
            show_default=True,
            help="How ranks add up; multimem needs NVLink multicast.",
        ),
        click.option(
            "--trust",
            type=_PATH,
            multiple=True,
            metavar="KEY",
            help="A public key that must have signed STORE::NAME; then all is hashed, by BLAKE3.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def use_gpu(backend: str) -> bool:
    """Whether to decode on a GPU."""
    if backend == "auto":
        import torch

        gpu = torch.cuda.is_available()
    else:
        gpu = backend == "gpu"
    if not gpu and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(
            "the reference decoder holds all ranks in one process", fix="Start it without torchrun"
        )
    return gpu


def own_rank() -> int:
    """This process's rank: of torchrun's variable, which `World.join` checks; else 0."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def open_gpu(
    artifact: Artifact | None,
    options: GpuOptions,
    *,
    tokens: int,
    asked: str = "the tokens to decode",
    trace: bool = False,
    seed: int | None = None,
) -> Any:
    """A GpuDecoder of this process's rank with room for `tokens`, or for --context if that is set.

    asked: what `tokens` come from, for a message. With a seed the weights are random ones in the
    layout of the artifact or, without an artifact, of the cubin. Everything that can be refused is
    refused before a byte is copied, and all ranks must be about to do the same. Raises NodeError,
    ArtifactError, UsageError, PeerError.
    """
    from dsv2mk.runner.world import World

    world = World.join()
    try:
        return _open(world, artifact, options, tokens, asked, trace, seed)
    except BaseException as error:
        world.fail(error)
        world.close(failed=True)
        raise


def _open(
    world: Any,
    artifact: Artifact | None,
    options: GpuOptions,
    tokens: int,
    asked: str,
    trace: bool,
    seed: int | None,
) -> Any:
    """`open_gpu` as one rank of a world."""
    import torch

    from dsv2mk.manifests.layout import RankLayout
    from dsv2mk.runner import device as gpu
    from dsv2mk.runner.cubins import find_cubin
    from dsv2mk.runner.decoder import GpuDecoder
    from dsv2mk.runner.load import dummy_weights, load_weights, weight_bytes

    world.doing("checking what it has")
    started = time.perf_counter()
    facts = gpu.facts_of(world.index)
    options.start_up["device"] = time.perf_counter() - started
    geometry = artifact.manifest.geometry if artifact else None
    ranks = artifact.manifest.topology.ranks if artifact else options.loopback
    processes = options.loopback or world.size
    _refuse_loopback(options, world.size, ranks)
    if ranks is not None:
        gpu.refuse_ranks(ranks, processes)
    started = time.perf_counter()
    sidecar, cubin = find_cubin(
        facts.arch, geometry, ranks, options.cubin, artifact, collective=options.collective
    )
    found = time.perf_counter()
    gpu.refuse_misfit(sidecar, facts, ranks=ranks or sidecar.topology.ranks, world=processes)
    layout = RankLayout(geometry=sidecar.geometry, topology=sidecar.topology, rank=world.rank)
    most = sidecar.geometry.max_position_embeddings
    context = _context(options.context, tokens, asked, most)
    GpuDecoder.refuse_memory(sidecar, facts, weight_bytes(layout), context, trace=trace)
    fits = time.perf_counter()
    kernel = gpu.Kernel(cubin, sidecar, world.index)
    options.start_up["cubin_load"] = found - started + time.perf_counter() - fits
    ctas = gpu.grid_size(
        sidecar, facts.multiprocessors, kernel.most_per_multiprocessor(), options.ctas
    )
    digest = artifact.manifest.digest if artifact else None
    world.agree(
        {
            "world size": world.size,
            "manifest digest": digest,
            "kernel key": sidecar.kernel_key,
            "CTAs": ctas,
            "context": context,
            "trace": trace,
            "seed of the weights": seed,
            "own GPU": facts.identity,
        }
    )
    device = torch.device("cuda", world.index)
    world.doing("loading")
    started = time.perf_counter()
    if seed is not None:
        weights = dummy_weights(layout, device, seed)
    else:
        assert artifact is not None
        with progress(weight_bytes(layout), "load", silent=not world.leads) as bar:

            def done(count: int) -> None:
                bar.update(count)
                world.look_if_told()

            weights = load_weights(artifact, world.rank, device, done, options.verify)
    options.start_up["verify"] = weights.seconds_hashed
    options.start_up["copy"] = time.perf_counter() - started - weights.seconds_hashed
    world.meet("loaded")
    return GpuDecoder(
        weights,
        kernel,
        context=context,
        ctas=ctas,
        timeout=options.timeout,
        trace=trace,
        world=world,
    )


def _refuse_loopback(options: GpuOptions, size: int, ranks: int | None) -> None:
    if options.loopback and size > 1:
        raise UsageError("--loopback is for one process", found=f"{size} of torchrun")
    if options.loopback and options.loopback != ranks:
        raise UsageError(
            "--loopback", expected=f"the artifact's {ranks} ranks", found=options.loopback
        )
    if options.loopback and options.collective == "multimem":
        raise UsageError("--loopback needs --collective p2p: one GPU has no multicast")


def _context(given: int | None, tokens: int, asked: str, most: int) -> int:
    """Tokens to make room for: as --context says, else as many as are needed."""
    if tokens > most:
        raise UsageError(
            f"{asked} do not fit the model's context",
            expected=f"at most {most} tokens",
            found=tokens,
        )
    if given is None:
        return tokens
    if not tokens <= given <= most:
        raise UsageError(
            "--context", expected=f"{tokens} (as many are needed) to {most}", found=given
        )
    return given


def check(artifact: Artifact, verify: str) -> None:
    """Hash what the reference decoder will map: none, a sample, or full.

    Files of a bundle whose signature was checked are hashed in full. Raises ArtifactError for a
    damaged one.
    """
    if verify == "none" and not artifact.signed:
        return
    sample = 100.0 if verify == "full" else SAMPLE
    with progress(artifact.bytes_to_verify(sample), "verify") as bar:
        problems = artifact.verify(sample, bar.update)
    if problems:
        name, problem = next(iter(problems.items()))
        raise ArtifactError(
            f"{artifact.label(name)}: {problem}", fix="dsv2mk verify tells about all files"
        )
