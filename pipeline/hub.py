"""Snapshots in the local Hugging Face cache: found by repo id, checked against the hub's hashes."""

import hashlib
import os
import re
from pathlib import Path

from dsv2mk.artifacts.console import progress
from dsv2mk.manifests.errors import InputError, UsageError
from dsv2mk.pipeline.snapshot import INDEX, Snapshot

_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PIECE = 1 << 20


def find_snapshot(name: str, revision: str | None) -> Path:
    """The folder of a snapshot: `name` itself, or a repo id in the local hub cache.

    Nothing is downloaded. HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE work as for huggingface_hub.
    A name that cannot be a repo id is returned as it is. Raises InputError for a repo id that is
    not there, UsageError for a revision of a folder or without huggingface_hub.
    """
    if Path(name).exists() or _REPO_ID.fullmatch(name) is None:
        if revision is not None:
            raise UsageError("--revision is for a repo id", found=name)
        return Path(name)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise UsageError(
            f"{name} is no folder, and looking for it in the hub cache needs huggingface_hub",
            fix="pip install 'dsv2mk[build]'",
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        at = f" at revision {revision}" if revision else ""
        raise InputError(
            f"{name}{at} is neither a folder nor in the hub cache",
            fix=f"hf download {name}" + (f" --revision {revision}" if revision else ""),
        ) from None


def check_hashes(snapshot: Snapshot) -> None:
    """Compare the checkpoint's files with the hashes that the download left beside them.

    In a hub cache a file is a link to a blob named by its hash; a download to a plain folder keeps
    the hash in `.cache/huggingface/download/<file>.metadata`. Raises InputError for a file that
    differs, UsageError if the snapshot does not tell the hash of every weight file.
    """
    names = [*snapshot.companion_files, INDEX, *sorted(snapshot.headers)]
    known = {name: etag for name in names if (etag := _etag(snapshot.path, name)) is not None}
    if unknown := [name for name in sorted(snapshot.headers) if name not in known]:
        raise UsageError(
            f"--check-hashes: {snapshot.path} tells no hashes of {len(unknown)} of its "
            f"{len(snapshot.headers)} weight files, {unknown[0]} for one",
            fix="Leave the option out, or use a hub download as it is",
        )
    total = sum((snapshot.path / name).stat().st_size for name in known)
    with progress(total, "check hashes") as bar:
        for name, etag in known.items():
            path = snapshot.path / name
            state = hashlib.sha256()
            if len(etag) == 40:  # a git blob, as small files have it
                state = hashlib.sha1(f"blob {path.stat().st_size}\0".encode())
            with open(path, "rb") as file:
                while piece := file.read(_PIECE):
                    state.update(piece)
                    bar.update(len(piece))
            if state.hexdigest() != etag:
                raise InputError(
                    f"{path} has the right size and wrong bytes",
                    expected=etag,
                    found=state.hexdigest(),
                    fix="Remove the file and download it again",
                )


def _etag(folder: Path, name: str) -> str | None:
    path = folder / name
    candidate = ""
    if path.is_symlink():
        candidate = Path(os.readlink(path)).name
    else:
        try:
            kept = folder / ".cache" / "huggingface" / "download" / f"{name}.metadata"
            candidate = kept.read_text().splitlines()[1]
        except (OSError, IndexError, ValueError):
            return None
    return candidate if re.fullmatch(r"[0-9a-f]{64}|[0-9a-f]{40}", candidate) else None
