"""`generate`: decode from an artifact."""

import os
import time
from pathlib import Path
from typing import Any

import click

from dsv2mk.artifacts.console import Report, reporting
from dsv2mk.manifests.canonical import parse_object
from dsv2mk.manifests.errors import ArtifactError, UsageError

_PATH = click.Path(path_type=Path)


def _token_ids(_: object, __: object, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list like 1,2,3") from None


@click.command()
@click.argument("folder", type=_PATH, metavar="DIR")
@click.option("--prompt", help="Text; needs a tokenizer in the artifact.")
@click.option("--token-ids", callback=_token_ids, metavar="1,2,3", help="The prompt as token ids.")
@click.option("--max-new", type=click.IntRange(1), required=True, help="Most tokens to decode.")
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the end-of-sequence token.")
@click.option(
    "--cache-dtype",
    type=click.Choice(["bf16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Of the latent cache.",
)
@click.option("--logits", type=_PATH, metavar="FILE", help="Store the logits of every position.")
@reporting
def generate(
    folder: Path,
    prompt: str | None,
    token_ids: list[int] | None,
    max_new: int,
    ignore_eos: bool,
    cache_dtype: str,
    logits: Path | None,
) -> Report:
    """Decode greedily with the reference decoder."""
    if (prompt is None) == (token_ids is None):
        raise UsageError("give either --prompt or --token-ids")
    from dsv2mk.artifacts.artifact import Artifact
    from dsv2mk.runner import reference

    artifact = Artifact.open(folder)
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
    if bad := [token for token in token_ids if not 0 <= token < geometry.vocab_size]:
        raise UsageError("token id", expected=f"0 to {geometry.vocab_size - 1}", found=bad[0])
    if len(token_ids) + max_new > geometry.max_position_embeddings:
        raise UsageError(
            "prompt and --max-new do not fit the context",
            expected=f"at most {geometry.max_position_embeddings} tokens",
            found=f"{len(token_ids)} + {max_new}",
        )
    if logits is not None:
        logits = _writable(logits)
    stop = frozenset() if ignore_eos else _stop_tokens(artifact)
    decoder = reference.ReferenceDecoder(artifact, reference.CACHE_DTYPES[cache_dtype])
    new: list[int] = []
    kept = []
    started = time.perf_counter()
    for position, (position_logits, token) in enumerate(
        reference.generate(decoder, token_ids, max_new, stop)
    ):
        if position == len(token_ids) - 2:
            started = time.perf_counter()  # the rate is that of decoding, not of the prompt
        if logits is not None:
            kept.append(position_logits)
        if token is not None:
            new.append(token)
    seconds = time.perf_counter() - started
    if logits is not None:
        _save_logits(logits, kept, [*token_ids, *new])
    text = None if tokenizer is None else tokenizer.decode(new)
    data: dict[str, Any] = {
        "backend": "reference",
        "prompt_token_ids": token_ids,
        "token_ids": new,
        "text": text,
        "tokens_per_s": len(new) / seconds,
        "stopped": "eos" if new[-1] in stop else "length",
        "cache_dtype": cache_dtype,
        "digest": artifact.manifest.digest,
    }
    shown = ",".join(map(str, new)) if text is None else (prompt or "") + text
    note = f"{len(new)} tokens, {data['tokens_per_s']:.1f} tokens/s, reference decoder"
    return Report(data=data, text=shown, notes=[note])


def _tokenizer(artifact: Any) -> Any:
    """The artifact's tokenizer, or None without a tokenizer.json or the package for it."""
    if "tokenizer.json" not in artifact.manifest.files:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    path = artifact.path / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise ArtifactError(f"{path}: {error}", fix="dsv2mk verify DIR tells more") from None


def _stop_tokens(artifact: Any) -> frozenset[int]:
    """End-of-sequence ids of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        if name in artifact.manifest.files:
            try:
                found = parse_object((artifact.path / name).read_bytes()).get("eos_token_id")
            except ValueError as error:
                raise ArtifactError(
                    f"{artifact.path / name} is {error}", fix="dsv2mk verify DIR tells more"
                ) from None
            if found is not None:
                tokens = found if isinstance(found, list) else [found]
                return frozenset(token for token in tokens if isinstance(token, int))
    return frozenset()


def _writable(path: Path) -> Path:
    """Where --logits goes, links followed: a new file, or one to replace."""
    real = Path(os.path.realpath(path))
    if not real.parent.is_dir() or (os.path.lexists(real) and not real.is_file()):
        raise UsageError("--logits", expected="a file in a folder that exists", found=path)
    return real


def _save_logits(path: Path, logits: list[Any], token_ids: list[int]) -> None:
    """logits [positions, V] fp32 and token_ids [positions + 1] int32, each fed or chosen."""
    import torch
    from safetensors.torch import save

    tensors = {
        "logits": torch.stack(logits),
        "token_ids": torch.tensor(token_ids, dtype=torch.int32),
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(save(tensors))  # `save_file` would ignore the umask
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
