"""`generate`, `bench` and `gate`: what runs on the node."""

import json
import os
import time
from pathlib import Path
from typing import Any

import click

from dsv2mk.artifacts.console import Report, reporting, size_text, table_text
from dsv2mk.artifacts.store import STORE_VARIABLE
from dsv2mk.manifests.canonical import parse_object
from dsv2mk.manifests.errors import EXIT_CHECK_FAILED, ArtifactError, UsageError
from dsv2mk.runner.session import (
    GpuOptions,
    backend_option,
    gpu_options,
    open_gpu,
    own_rank,
    use_gpu,
)

_PATH = click.Path(path_type=Path)
_WHERE = click.Path(path_type=str)  # a folder, or STORE::NAME


def _token_ids(_: object, __: object, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list like 1,2,3") from None


@click.command()
@click.argument("where", type=_WHERE, metavar="DIR|STORE::NAME")
@click.option("--prompt", help="Text; needs a tokenizer in the artifact.")
@click.option("--token-ids", callback=_token_ids, metavar="1,2,3", help="The prompt as token ids.")
@click.option("--max-new", type=click.IntRange(1), required=True, help="Most tokens to decode.")
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the end-of-sequence token.")
@click.option(
    "--cache-dtype",
    type=click.Choice(["bf16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Of the latent cache; fp32 needs the reference decoder.",
)
@click.option("--logits", type=_PATH, metavar="FILE", help="Store the logits of every position.")
@backend_option
@gpu_options
@reporting
def generate(
    where: str,
    prompt: str | None,
    token_ids: list[int] | None,
    max_new: int,
    ignore_eos: bool,
    cache_dtype: str,
    logits: Path | None,
    backend: str,
    **options: Any,
) -> Report:
    """Decode greedily, on a GPU or with the reference decoder."""
    if (prompt is None) == (token_ids is None):
        raise UsageError("give either --prompt or --token-ids")
    gpu = use_gpu(backend)
    if gpu and cache_dtype != "bf16":
        raise UsageError("--cache-dtype fp32", fix="Add --backend reference")
    from dsv2mk.artifacts.artifact import Artifact

    artifact = Artifact.open(where, own_rank() if gpu else None, options["trust"])
    geometry = artifact.manifest.geometry
    tokenizer = _tokenizer(artifact)
    if prompt is not None:
        if tokenizer is None:
            raise UsageError(
                "--prompt needs a tokenizer.json in the artifact and the package tokenizers",
                fix="pip install 'dsv2mk[generate]', or give --token-ids",
            )
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UsageError("--prompt", expected="text in UTF-8") from None
        token_ids = tokenizer.encode(prompt).ids
    if not token_ids:
        raise UsageError("the prompt is empty", expected="at least one token")
    _check_tokens(token_ids, geometry)
    if len(token_ids) + max_new > geometry.max_position_embeddings:
        raise UsageError(
            "prompt and --max-new do not fit the context",
            expected=f"at most {geometry.max_position_embeddings} tokens",
            found=f"{len(token_ids)} + {max_new}",
        )
    if logits is not None:
        logits = _writable(logits, "--logits", where)
    stop = frozenset() if ignore_eos else _stop_tokens(artifact)
    decode = _on_gpu if gpu else _on_reference
    decoded = decode(
        artifact, token_ids, max_new, stop, logits is not None, cache_dtype, GpuOptions(**options)
    )
    if decoded is None:
        return _followed()
    new, kept, seconds = decoded
    if logits is not None:
        _save_logits(logits, kept, [*token_ids, *new])
    text = None if tokenizer is None else tokenizer.decode(new)
    data: dict[str, Any] = {
        "backend": "gpu" if gpu else "reference",
        "prompt_token_ids": token_ids,
        "token_ids": new,
        "text": text,
        "tokens_per_s": len(new) / seconds,
        "stopped": "eos" if new[-1] in stop else "length",
        "cache_dtype": cache_dtype,
        "digest": artifact.manifest.digest,
    }
    shown = ",".join(map(str, new)) if text is None else (prompt or "") + text
    what = "GPU" if gpu else "reference decoder"
    note = f"{len(new)} tokens, {data['tokens_per_s']:.1f} tokens/s, {what}"
    return Report(data=data, text=shown, notes=[note])


def _followed() -> Report:
    """Of another rank than 0: rank 0 reports."""
    return Report(data={}, text="", silent=True)


def _on_reference(
    artifact: Any,
    prompt: list[int],
    max_new: int,
    stop: frozenset[int],
    keep: bool,
    cache_dtype: str,
    options: GpuOptions,
) -> tuple[list[int], list[Any], float]:
    """(new tokens, logits of each position if wanted, seconds of decoding) by the reference."""
    from dsv2mk.runner import reference
    from dsv2mk.runner.session import check

    check(artifact, options.verify)
    decoder = reference.ReferenceDecoder(artifact, reference.CACHE_DTYPES[cache_dtype])
    new: list[int] = []
    kept = []
    started = time.perf_counter()
    for position, (logits, token) in enumerate(reference.generate(decoder, prompt, max_new, stop)):
        if position == len(prompt) - 2:
            started = time.perf_counter()  # the rate is that of decoding, not of the prompt
        if keep:
            kept.append(logits)
        if token is not None:
            new.append(token)
    return new, kept, time.perf_counter() - started


def _on_gpu(
    artifact: Any,
    prompt: list[int],
    max_new: int,
    stop: frozenset[int],
    keep: bool,
    cache_dtype: str,
    options: GpuOptions,
) -> tuple[list[int], list[Any], float] | None:
    """`_on_reference` on a GPU; token by token if logits are wanted, else in long launches.

    None on another rank than 0.
    """
    from dsv2mk.runner.decoder import generate as decode

    with open_gpu(artifact, options, tokens=len(prompt) + max_new) as decoder:
        if decoder.follow():
            return None
        kept: list[Any] = []

        def note(logits: Any) -> None:
            kept.append(logits.cpu().clone())

        decoder.reset()
        for token in prompt[:-1] if keep else []:
            note(decoder.step(token))
        if prompt[:-1] and not keep:
            decoder.feed(prompt[:-1])
        started = time.perf_counter()
        new = list(decode(decoder, prompt[-1], max_new, stop, note if keep else None))
        return new, kept, time.perf_counter() - started


@click.command()
@click.argument("where", type=_WHERE, metavar="[DIR|STORE::NAME]", required=False)
@click.option(
    "--load-format",
    type=click.Choice(["auto", "dummy"]),
    default="auto",
    show_default=True,
    help="dummy: random weights; DIR may be left out, the cubin says what model.",
)
@click.option("--input-len", type=click.IntRange(1), default=128, show_default=True)
@click.option("--output-len", type=click.IntRange(1), default=1008, show_default=True)
@click.option(
    "--skip-prompt",
    is_flag=True,
    help="Fill the cache with random values instead of decoding a prompt of --input-len.",
)
@click.option("--warmup", type=click.IntRange(0), default=2, show_default=True)
@click.option("--iters", type=click.IntRange(1), default=3, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
@click.option("--profile", is_flag=True, help="Also show the time of each phase.")
@click.option(
    "--loopback",
    type=click.IntRange(2),
    metavar="R",
    help="Play rank 0 of R on one GPU, its own peer: times are real, tokens are not.",
)
@click.option(
    "--baseline",
    type=click.Choice(["torch"]),
    help="Measure the stock way too, on the same weights: PyTorch, Triton, a CUDA graph, NCCL.",
)
@click.option("--output-json", type=_PATH, metavar="FILE", help="Store what was measured.")
@gpu_options
@reporting
def bench(
    where: str | None,
    load_format: str,
    input_len: int,
    output_len: int,
    skip_prompt: bool,
    warmup: int,
    iters: int,
    seed: int,
    profile: bool,
    loopback: int | None,
    baseline: str | None,
    output_json: Path | None,
    **given: Any,
) -> Report:
    """Measure milliseconds a token on a GPU."""
    started = time.perf_counter()
    from dsv2mk.artifacts.artifact import Artifact

    options = GpuOptions(**given, loopback=loopback)
    dummy = load_format == "dummy"
    if where is None and not (dummy and options.cubin):
        raise UsageError("no artifact", fix="Name one, or use --load-format dummy --cubin DIR")
    if baseline and loopback:
        raise UsageError("--baseline needs all ranks", fix="Leave --loopback out")
    if output_json is not None:
        output_json = _writable(output_json, "--output-json", where)
    from dsv2mk.runner import bench as measure

    before = time.perf_counter()
    artifact = None if where is None else Artifact.open(where, own_rank(), options.trust)
    start_up = {"import": before - started, "open": time.perf_counter() - before}
    before = time.perf_counter()
    extra = 32 if profile else 0
    request = measure.Request(
        input_len=input_len,
        output_len=output_len,
        warmup=warmup,
        iterations=iters,
        seed=seed,
        skip_prompt=skip_prompt,
    )
    with open_gpu(
        artifact,
        options,
        tokens=input_len + output_len + extra,
        asked="--input-len + --output-len" + (f" + {extra} of --profile" if profile else ""),
        seed=seed if dummy else None,
    ) as decoder:
        opened = time.perf_counter() - before
        follows = decoder.follow()
        logits = None
        if not follows:
            before = time.perf_counter()
            decoder.reset()
            decoder.feed([0])
            start_up |= options.start_up
            start_up["first_launch"] = time.perf_counter() - before
            start_up["to_first_token"] = time.perf_counter() - started
            data = measure.bench(decoder, request)
            if profile:
                data["profile"] = measure.profile(decoder, extra)
            if baseline:
                logits = measure.kernel_logits(decoder, request)
                decoder.dismiss()
        if baseline:
            decoder.world.doing("measuring the baseline")
            stock = measure.stock(decoder, request, logits)
        if follows:
            return _followed()
        if baseline:
            data["baseline"] = {"kind": baseline, **stock}
            data["speedup"] = stock["ms_per_token"]["mean"] / data["ms_per_token"]["mean"]
    side = decoder.sidecar
    data |= {
        "device": measure.device_facts(decoder.world.index),
        "ctas": decoder.ctas,
        "kernel_key": side.kernel_key,
        "cubin_sha256": side.cubin_sha256,
        "digest": artifact.manifest.digest if artifact and not dummy else None,
        "load_format": load_format,
        "layers": side.geometry.num_hidden_layers,
        "hidden_size": side.geometry.hidden_size,
        "ranks": side.topology.ranks,
        "loopback": loopback is not None,
        "collective": options.collective,
        "input_len": input_len,
        "output_len": output_len,
        "skip_prompt": skip_prompt,
        "warmup": warmup,
        "iterations": iters,
        "seconds_to_open": opened,
        "start_up": start_up,
    }
    if output_json is not None:
        _replace(output_json, (json.dumps(data, indent=1) + "\n").encode())
    ms = data["ms_per_token"]
    rows = [
        ["ms/token", *(f"{name} {ms[name]:.3f}" for name in ("mean", "p50", "p90", "p99"))],
        ["tokens/s", f"{data['tokens_per_s']:.1f}"],
        ["read a token", size_text(data["bytes_per_token"])],
        [
            "achieved",
            f"{data['achieved_tb_s']:.2f} TB/s",
            f"{100 * data['share_of_read_bandwidth']:.0f}%",
            f"of {data['read_bandwidth_tb_s']:.2f} TB/s",
        ],
        ["start-up s", *(f"{name} {seconds:.2f}" for name, seconds in start_up.items())],
    ]
    if baseline:
        ms, error = stock["ms_per_token"], stock["relative_error"]
        rows += [
            ["PyTorch", *(f"{name} {ms[name]:.3f}" for name in ("mean", "p50", "p90", "p99"))],
            ["", f"{data['speedup']:.2f}x", f"logits differ by {error['median']:.1e}"],
        ]
    wide = max(len(row) for row in rows)
    text = table_text([row + [""] * (wide - len(row)) for row in rows])
    if profile:
        parts = [["hop", "work us", "wait us"]]
        parts += [
            [part["hop"], f"{part['work_us']:.2f}", f"{part['wait_us']:.2f}"]
            for part in data["profile"]
        ]
        text += "\n\n" + table_text(parts, frozenset({1, 2}))
    shown = {name: value for name, value in data.items() if name != "samples_ms"}
    if baseline:
        shown["baseline"] = {k: v for k, v in data["baseline"].items() if k != "samples_ms"}
    return Report(data=shown if output_json is not None else data, text=text)


@click.command()
@click.argument("where", type=_WHERE, metavar="DIR|STORE::NAME")
@click.option(
    "--reference",
    "stored",
    type=_PATH,
    metavar="FILE",
    help="Logits stored by `generate --logits`; else the reference decoder runs.",
)
@click.option("--positions", type=click.IntRange(1), default=32, show_default=True)
@click.option("--free-run", type=click.IntRange(0), default=64, show_default=True, metavar="TOKENS")
@click.option("--phases", is_flag=True, help="Compare what every phase leaves, on a GPU.")
@click.option("--strict", is_flag=True, help="Logits must be bit-equal, also from run to run.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
@click.option("--tolerance", type=click.FloatRange(0), default=2e-3, show_default=True)
@click.option("--output-json", type=_PATH, metavar="FILE", help="Store what was found.")
@backend_option
@gpu_options
@reporting
def gate(
    where: str,
    stored: Path | None,
    positions: int,
    free_run: int,
    phases: bool,
    strict: bool,
    seed: int,
    tolerance: float,
    output_json: Path | None,
    backend: str,
    **given: Any,
) -> Report:
    """Check a decoder's numbers; exits 1 if they are wrong."""
    gpu = use_gpu(backend)
    if not gpu and stored is None:
        raise UsageError(
            "the reference decoder cannot be its own reference",
            fix="Give --reference FILE, made by dsv2mk generate DIR --logits FILE",
        )
    if phases and (not gpu or stored is not None):
        raise UsageError("--phases compares a GPU with the reference decoder, without --reference")
    if output_json is not None:
        output_json = _writable(output_json, "--output-json", where)
    from dsv2mk.artifacts.artifact import Artifact
    from dsv2mk.runner.run_gate import GateRequest, run_gate

    if output_json is not None and stored is not None and output_json == stored.resolve():
        raise UsageError("--output-json", expected="another file than --reference", found=stored)
    # The reference decoder runs on rank 0, and holds all ranks.
    alone = not gpu or (stored is None and own_rank() == 0)
    artifact = Artifact.open(where, None if alone else own_rank(), given["trust"])
    request = GateRequest(
        positions=positions,
        free_run=free_run,
        phases=phases,
        strict=strict,
        seed=seed,
        tolerance=tolerance,
        stored=stored,
        verify=given["verify"],
    )
    verdict = run_gate(artifact, request, GpuOptions(**given) if gpu else None)
    if verdict is None:
        return _followed()
    data = {**verdict.data, "passed": not verdict.failures, "failures": verdict.failures}
    if output_json is not None:
        _replace(output_json, (json.dumps(data, indent=1) + "\n").encode())
    lines = [f"FAILED {failure}" for failure in verdict.failures[:20]]
    if len(verdict.failures) > len(lines):
        lines.append(f"and {len(verdict.failures) - len(lines)} more")
    rows = [[name, _short(value)] for name, value in data.items() if name != "failures"]
    text = "\n".join([table_text(rows), *lines])
    return Report(data=data, text=text, exit_code=EXIT_CHECK_FAILED if verdict.failures else 0)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(one)}" for name, one in value.items())
    return str(value)


def _check_tokens(token_ids: list[int], geometry: Any) -> None:
    if bad := [token for token in token_ids if not 0 <= token < geometry.vocab_size]:
        raise UsageError("token id", expected=f"0 to {geometry.vocab_size - 1}", found=bad[0])


def _tokenizer(artifact: Any) -> Any:
    """The artifact's tokenizer, or None without a tokenizer.json or the package for it."""
    if "tokenizer.json" not in artifact.manifest.files:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    encoded = artifact.read("tokenizer.json")
    try:
        return Tokenizer.from_buffer(encoded)
    except Exception as error:  # the package raises nothing narrower
        raise ArtifactError(
            f"{artifact.label('tokenizer.json')}: {error}", fix="dsv2mk verify tells more"
        ) from None


def _stop_tokens(artifact: Any) -> frozenset[int]:
    """End-of-sequence ids of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        if name in artifact.manifest.files:
            try:
                found = parse_object(artifact.read(name)).get("eos_token_id")
            except ValueError as error:
                raise ArtifactError(
                    f"{artifact.label(name)} is {error}", fix="dsv2mk verify tells more"
                ) from None
            if found is not None:
                tokens = found if isinstance(found, list) else [found]
                return frozenset(token for token in tokens if isinstance(token, int))
    return frozenset()


def _writable(path: Path, option: str, where: str | None) -> Path:
    """Where an output goes, links followed: a new file, or one to replace; not in the artifact."""
    real = Path(os.path.realpath(path))
    folder, mark, _ = (where or "").rpartition("::")
    store = folder or os.environ.get(STORE_VARIABLE) if mark else None
    if any(at and real.is_relative_to(os.path.realpath(at)) for at in (where, store)):
        raise UsageError(option, expected="a file outside of the artifact", found=path)
    if not real.parent.is_dir() or (os.path.lexists(real) and not real.is_file()):
        raise UsageError(option, expected="a file in a folder that exists", found=path)
    return real


def _save_logits(path: Path, logits: list[Any], token_ids: list[int]) -> None:
    """logits [positions, V] fp32 and token_ids [positions + 1] int32, each fed or chosen."""
    import torch
    from safetensors.torch import save

    tensors = {
        "logits": torch.stack(logits),
        "token_ids": torch.tensor(token_ids, dtype=torch.int32),
    }
    _replace(path, save(tensors))  # `save_file` would ignore the umask


def _replace(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
