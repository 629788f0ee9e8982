"""The input: a Hugging Face checkpoint folder, opened read-only and checked before any work.

All checks that need no tensor data happen in `Snapshot.open`: the index, every file's header,
every tensor's name, shape and dtype. Tensor data is then read once (see reader.py).
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from dsv2mk.artifacts.container import ContainerError, Header, read_header
from dsv2mk.manifests.canonical import FILE_NAME, parse_object
from dsv2mk.manifests.checkpoint import (
    IGNORED,
    LM_HEAD,
    checkpoint_tensors,
    is_linear,
    scale_name,
)
from dsv2mk.manifests.errors import InputError
from dsv2mk.manifests.geometry import Geometry
from dsv2mk.manifests.scheme import BLOCK
from dsv2mk.pipeline.reader import Reader, SourceTensor, band_rows

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: Copied into the artifact where they are there, beside LICENSE*.
COMPANIONS = (
    CONFIG,
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)

_PLAIN_DTYPES = ("BF16", "F16", "F32")


@dataclass(kw_only=True, frozen=True)
class Snapshot:
    """A checkpoint folder that has passed every check that needs no tensor data."""

    path: Path
    geometry: Geometry
    tensors: Mapping[str, SourceTensor]
    headers: Mapping[str, Header]  # by file name
    companion_files: Mapping[str, bytes]  # go into the artifact as they are
    stamps: Mapping[str, list[int]]  # of the files, from before any of them was read

    @classmethod
    def open(cls, path: Path) -> "Snapshot":
        """Read config.json, the index and all headers. Raises InputError."""
        companions = _read_companions(path)
        config = _parse_json(companions[CONFIG], path / CONFIG)
        geometry = Geometry.from_config(config)
        kept_plain = _quantization(config)
        stamps = _stamps(path, [INDEX] if os.path.lexists(path / INDEX) else [])
        weight_map, files = _weight_map(path)
        stamps |= _stamps(path, files)
        headers, tensors = _read_files(path, weight_map, files)
        _check_tensors(path, geometry, tensors, kept_plain)
        return cls(
            path=path,
            geometry=geometry,
            tensors=tensors,
            headers=headers,
            companion_files=companions,
            stamps=stamps,
        )

    @cached_property
    def used(self) -> list[SourceTensor]:
        """The tensors that a build reads, in the order of the data flow, scales after weights."""
        out: list[SourceTensor] = []
        for name in checkpoint_tensors(self.geometry):
            for candidate in (name, scale_name(name)):
                if candidate in self.tensors:
                    out.append(self.tensors[candidate])
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that a build reads."""
        return sum(tensor.stored.nbytes for tensor in self.used)

    def has_changed(self) -> bool:
        """Whether a file is not what it was when the snapshot was opened."""
        return (
            _stamps(self.path, list(self.stamps)) != self.stamps
            or _read_companions(self.path) != self.companion_files
        )

    def companions(self) -> dict[str, Any]:
        """Part of the manifest's `source` section: sha256 of the files that are copied."""
        files = self.companion_files.items()
        return {"copied": {name: hashlib.sha256(data).hexdigest() for name, data in files}}

    def identity(self, digests: Mapping[str, str]) -> dict[str, Any]:
        """Part of the manifest's `source` section, from the digests of all used tensors.

        A file's digest is the xxh3-128 of its header (length word included) followed by the
        16-byte digests of its used tensors in the order of their offsets.
        """
        used = {tensor.name for tensor in self.used}
        files: dict[str, Any] = {}
        for name, header in sorted(self.headers.items()):
            state = xxhash.xxh3_128(header.encoded)
            for tensor in header.tensors:
                if tensor in used and self.tensors[tensor].file == name:
                    state.update(bytes.fromhex(digests[tensor]))
            files[name] = {"size": header.file_size, "digest": state.hexdigest()}
        return {"files": files}

    def hash_tensors(self, done: Callable[[int], object]) -> dict[str, str]:
        """Digests of all used tensors: reads the whole input."""
        reader = Reader(done)
        for tensor in self.used:
            for _ in reader.bands(tensor, band_rows(tensor)):
                pass
        return reader.digests


# ---- reading ----


def _read_bytes(folder: Path, name: str) -> bytes:
    try:
        if (folder / name).exists() and not (folder / name).is_file():
            raise OSError(errno.EINVAL, "not a regular file")  # a pipe would wait for ever
        return (folder / name).read_bytes()
    except OSError as error:
        raise _unreadable(folder, name, error) from None


def _unreadable(folder: Path, name: str, error: OSError) -> InputError:
    path = folder / name
    if not os.path.isdir(folder):
        return InputError(f"{folder} is not a folder", fix="Give the folder of a checkpoint")
    if path.is_symlink() and not path.exists():
        return InputError(
            f"{path} is a link to {os.readlink(path)}, which does not exist",
            fix="The download is not complete: run hf download again",
        )
    fix = "Is the checkpoint complete?" if error.errno == errno.ENOENT else None
    return InputError(f"{path}: {error.strerror}", fix=fix)


def _parse_json(data: bytes, path: Path) -> dict[str, Any]:
    try:
        return parse_object(data)
    except ValueError as error:
        raise InputError(f"{path} is {error}") from None


def _read_companions(folder: Path) -> dict[str, bytes]:
    """config.json and, where they are there, the other small files, by name."""
    names = [name for name in COMPANIONS if name == CONFIG or os.path.lexists(folder / name)]
    names += sorted(path.name for path in folder.glob("LICENSE*") if not path.is_dir())
    return {name: _read_bytes(folder, name) for name in names if FILE_NAME.fullmatch(name)}


def _stamps(folder: Path, files: list[str]) -> dict[str, list[int]]:
    """For each file: size, both times of change and inode."""
    out: dict[str, list[int]] = {}
    for name in files:
        try:
            info = os.stat(folder / name)
        except OSError as error:
            raise _unreadable(folder, name, error) from None
        out[name] = [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]
    return out


def _weight_map(folder: Path) -> tuple[dict[str, str] | None, list[str]]:
    """Tensor name to file name from the index, or None for a single file; and all files."""
    index = folder / INDEX
    if not os.path.lexists(index) and os.path.lexists(folder / SINGLE):
        return None, [SINGLE]
    weight_map = _parse_json(_read_bytes(folder, INDEX), index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(str(index), expected="a weight_map", found=type(weight_map).__name__)
    checked: set[str] = set()
    for tensor, file in weight_map.items():
        if isinstance(file, str) and file in checked:
            continue
        parts = PurePosixPath(file).parts if isinstance(file, str) else ()
        if not parts or file.startswith("/") or ".." in parts or "\0" in file:
            raise InputError(
                f"{index}: {tensor}", expected="a file inside the folder", found=ascii(file)
            )
        checked.add(file)
    files = sorted(checked)
    absent = [name for name in files if not (folder / name).exists()]
    if absent:
        error = _unreadable(folder, absent[0], FileNotFoundError(2, "No such file"))
        if len(absent) > 1:
            error = InputError(f"{error.what} ({len(absent)} files are missing)", fix=error.fix)
        raise error
    return weight_map, files


def _read_files(
    folder: Path, weight_map: Mapping[str, str] | None, files: list[str]
) -> tuple[dict[str, Header], dict[str, SourceTensor]]:
    headers: dict[str, Header] = {}
    for name in files:
        try:
            headers[name] = read_header(folder / name)
        except ContainerError as error:
            raise InputError(f"{folder / name}: {error}", fix="Download this file again") from None
        except OSError as error:
            raise _unreadable(folder, name, error) from None
    if weight_map is None:
        weight_map = dict.fromkeys(headers[SINGLE].tensors, SINGLE)
    paths = {name: folder / name for name in files}
    tensors: dict[str, SourceTensor] = {}
    for name, file in weight_map.items():
        stored = headers[file].tensors.get(name)
        if stored is None:
            raise InputError(f"{paths[file]} does not hold {name}, which {INDEX} places there")
        tensors[name] = SourceTensor(name=name, file=file, path=paths[file], stored=stored)
    return headers, tensors


# ---- checks ----


def _quantization(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """None for a plain checkpoint; for block-FP8, the modules that it keeps unquantised."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, Mapping):
        raise InputError(f"{CONFIG}: quantization_config", expected="an object")
    found = {
        "quant_method": quantization.get("quant_method"),
        "weight_block_size": quantization.get("weight_block_size"),
        "fmt": quantization.get("fmt", "e4m3"),
    }
    wanted = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}
    if found != wanted:
        raise InputError(
            f"{CONFIG}: quantization_config is not supported",
            expected=json.dumps(wanted),
            found=json.dumps(found),
            fix="Use the bf16 checkpoint",
        )
    plain = quantization.get("modules_to_not_convert")
    plain = [] if plain is None else plain
    if not isinstance(plain, list) or not all(isinstance(name, str) for name in plain):
        raise InputError(
            f"{CONFIG}: quantization_config.modules_to_not_convert",
            expected="a list of module names",
        )
    return tuple(plain)


def _check_tensors(
    folder: Path,
    geometry: Geometry,
    tensors: Mapping[str, SourceTensor],
    kept_plain: tuple[str, ...] | None,
) -> None:
    expected = checkpoint_tensors(geometry)
    missing = [
        name
        for name in expected
        if name not in tensors and not (name == LM_HEAD and geometry.tie_word_embeddings)
    ]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = " (tie_word_embeddings is false)" if missing[0] == LM_HEAD else ""
        raise InputError(
            f"{folder}: {missing[0]}{more} missing{hint}",
            fix="The checkpoint and its config.json do not belong together, or it is not complete",
        )
    for name, shape in expected.items():
        if name in tensors:
            _check_tensor(tensors[name], shape, tensors, kept_plain)
    for name, tensor in tensors.items():
        if (
            name not in expected
            and IGNORED.fullmatch(name) is None
            and not _is_scale(name, tensors)
        ):
            raise InputError(
                f"{tensor.path}: {name} is not a tensor of this geometry",
                fix="The checkpoint and its config.json do not belong together",
            )


def _is_scale(name: str, tensors: Mapping[str, SourceTensor]) -> bool:
    weight = name.removesuffix(scale_name(""))
    return weight != name and weight in tensors and tensors[weight].dtype == "F8_E4M3"


def _check_tensor(
    tensor: SourceTensor,
    shape: tuple[int, ...],
    tensors: Mapping[str, SourceTensor],
    kept_plain: tuple[str, ...] | None,
) -> None:
    where = f"{tensor.path}: {tensor.name}"
    if tensor.shape != shape:
        raise InputError(f"{where}: shape", expected=list(shape), found=list(tensor.shape))
    # A module's name matches whole parts: mlp.gate is the router, and not mlp.gate_proj.
    quantised = (
        kept_plain is not None
        and is_linear(tensor.name)
        and not any(f".{module}." in f".{tensor.name}." for module in kept_plain)
    )
    allowed = ("F8_E4M3",) if quantised else _PLAIN_DTYPES
    if tensor.dtype not in allowed:
        because = "its quantization_config" if kept_plain is not None else "no quantization_config"
        raise InputError(
            f"{where}: dtype, {CONFIG} having {because}",
            expected=" or ".join(allowed),
            found=tensor.dtype,
        )
    if not quantised:
        return
    scale = tensors.get(scale_name(tensor.name))
    if scale is None:
        raise InputError(f"{where} is FP8 and has no {scale_name(tensor.name)}")
    blocks = tuple(-(-extent // BLOCK) for extent in shape)
    if scale.shape != blocks or scale.dtype != "F32":
        raise InputError(
            f"{scale.path}: {scale.name}",
            expected=f"F32 {list(blocks)}",
            found=f"{scale.dtype} {list(scale.shape)}",
        )
