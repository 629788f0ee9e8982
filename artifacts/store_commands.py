"""`publish`, `pull`, `ls`, `tag`, `rm` and `gc`: commands of a store."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsv2mk.artifacts.console import Report, progress, reporting, size_text, table_text
from dsv2mk.manifests.errors import EXIT_CHECK_FAILED, ArtifactError

if TYPE_CHECKING:
    from dsv2mk.artifacts.store import Store
    from dsv2mk.artifacts.transfer import Copied

_PATH = click.Path(path_type=Path)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _words(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Positional arguments, of which STORE may be left out where DSV2MK_STORE is set."""

    def check(_: object, __: object, values: tuple[str, ...]) -> tuple[str, ...]:
        default = os.environ.get("DSV2MK_STORE")
        if default and len(values) == len(names) - 1:
            at = names.index("STORE")
            values = (*values[:at], default, *values[at:])
        if len(values) != len(names):
            raise click.UsageError(
                f"expected {len(names)} arguments, found {len(values)}: {' '.join(names)} "
                "(STORE may be left out if DSV2MK_STORE is set)"
            )
        return values

    shown = " ".join("[STORE]" if name == "STORE" else name for name in names)
    return click.argument("words", nargs=-1, metavar=shown, callback=check)


def _archs(_: object, __: object, text: str | None) -> list[str] | None:
    return None if text is None else list(dict.fromkeys(text.split(",")))


def _seconds(_: object, __: object, text: str) -> float:
    if not (match := re.fullmatch(r"([0-9]{1,9})([smhd])", text)):
        raise click.BadParameter(f"expected a number and one of s, m, h, d; found {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def _open(path: str) -> "Store":
    from dsv2mk.artifacts.store import Store

    return Store.open(Path(path))


_arch = click.option(
    "--arch", "archs", callback=_archs, metavar="ARCH[,ARCH]", help="Only cubins for these."
)


_copy = click.option(
    "--copy",
    "copies",
    is_flag=True,
    help="Make no hard links, which are read-only: copy, also within one file system.",
)


def _bytes(copied: "Copied") -> tuple[dict[str, int], str]:
    """What was transferred: for JSON, and in words."""
    data = {
        "bytes_written": copied.written,
        "bytes_resumed": copied.kept,
        "bytes_shared": copied.shared,
    }
    text = f"{size_text(copied.written)} written, {size_text(copied.kept)} taken up, "
    return data, text + f"{size_text(copied.shared)} shared"


@click.command()
@_words("DIR", "STORE")
@click.option("--tag", "tag_name", required=True, metavar="NAME", help="Name it so in the store.")
@_arch
@click.option("--sign", type=_PATH, metavar="KEY", help="Sign with this ed25519 private key.")
@_copy
@reporting
def publish(
    words: tuple[str, str], tag_name: str, archs: list[str] | None, sign: Path | None, copies: bool
) -> Report:
    """Put an artifact, with its cubins, into a store; an interrupted publish is taken up again."""
    from dsv2mk.artifacts.artifact import read_manifest
    from dsv2mk.artifacts.publish import check_tag, create_store
    from dsv2mk.artifacts.publish import publish as put
    from dsv2mk.artifacts.store import unique

    folder, path = map(Path, words)
    check_tag(tag_name)
    objects = unique(read_manifest(folder).files).values()
    with progress(sum(entry.size for _, entry in objects), "publish") as bar:
        done = put(
            folder,
            create_store(path),
            tag_name,
            archs=archs,
            sign=sign,
            links=not copies,
            done=bar.update,
        )
    numbers, transferred = _bytes(done.copied)
    data = {
        "digest": done.bundle.digest,
        "artifact": done.bundle.artifact,
        "tag": tag_name,
        "archs": done.bundle.archs,
        "files": len(done.files),
        "signed": sign is not None,
        **numbers,
        "bytes_reused": done.reused,
    }
    text = (
        f"{tag_name}: bundle {done.bundle.digest}, {len(done.files)} files; "
        f"{transferred}, {size_text(done.reused)} were there"
    )
    return Report(data=data, text=text)


@click.command()
@_words("STORE", "NAME|DIGEST", "DEST")
@click.option("--rank", type=click.IntRange(0), help="Only what this rank needs.")
@_arch
@click.option(
    "--trust",
    type=_PATH,
    multiple=True,
    metavar="KEY",
    help="Demand a signature by one of these ed25519 public keys.",
)
@_copy
@reporting
def pull(
    words: tuple[str, str, str],
    rank: int | None,
    archs: list[str] | None,
    trust: tuple[Path, ...],
    copies: bool,
) -> Report:
    """Copy an artifact out of a store, or add to DEST what is missing there."""
    from dsv2mk.artifacts.pull import pull as get
    from dsv2mk.artifacts.pull import select_files, trusted_bundle
    from dsv2mk.artifacts.store import unique

    store, dest = _open(words[0]), Path(words[2])
    digest = store.resolve(words[1])
    bundle = trusted_bundle(store, digest, trust)
    objects = unique(select_files(bundle, store.manifest(bundle), rank, archs)).values()
    with progress(sum(entry.size for _, entry in objects), "pull") as bar:
        done = get(
            store,
            digest,
            dest,
            rank=rank,
            archs=archs,
            trust=trust,
            links=not copies,
            done=bar.update,
        )
    numbers, transferred = _bytes(done.copied)
    data = {
        "digest": digest,
        "artifact": done.bundle.artifact,
        "files": sorted(done.files),
        "added": sorted(done.added),
        **numbers,
    }
    text = f"{dest}: {len(done.files)} files of bundle {digest}, {len(done.added)} of them new; "
    return Report(data=data, text=text + transferred)


@click.command()
@_words("STORE")
@reporting
def ls(words: tuple[str]) -> Report:
    """List the bundles of a store and their tags."""
    from dsv2mk.artifacts.store import unique

    store = _open(words[0])
    tags = store.tags()
    rows = [["tag", "bundle", "artifact", "ranks", "cubins", "size", "signed"]]
    bundles: list[dict[str, Any]] = []
    problems = {str(store.path / "tags" / n): str(e) for n, e in tags.items() if type(e) is not str}
    for digest in store.bundle_digests():
        own = sorted(name for name, named in tags.items() if named == digest)
        try:
            found = store.if_there(digest, lambda bundle: (bundle, store.manifest(bundle)))
            if found is None:
                continue  # it was removed meanwhile
            bundle, manifest = found
            objects = unique(bundle.table(manifest)).values()
        except ArtifactError as error:
            problems[str(store.bundle_place(digest))] = str(error)
            continue
        entry: dict[str, Any] = {
            "digest": digest,
            "tags": own,
            "artifact": bundle.artifact,
            "ranks": manifest.topology.ranks,
            "archs": bundle.archs,
            "bytes": sum(file.size for _, file in objects),
            "signed": bool(store.signature_places(digest)),
        }
        bundles.append(entry)
        shown = [str(entry["ranks"]), ",".join(bundle.archs) or "none", size_text(entry["bytes"])]
        shown.append("yes" if entry["signed"] else "no")
        rows += [[name, digest[:16], bundle.artifact[:16], *shown] for name in own or ["-"]]
    for name, named in tags.items():
        if isinstance(named, str) and store.dangling(name):
            problems[str(store.path / "tags" / name)] = f"names bundle {named}, which is missing"
    text = table_text(rows, frozenset((3, 5))) if bundles else "no bundles"
    return Report(
        data={"bundles": bundles, "problems": problems},
        text=text,
        notes=[f"{path}: {problem}" for path, problem in problems.items()],
        exit_code=EXIT_CHECK_FAILED if problems else 0,
    )


@click.command()
@_words("STORE", "NAME|DIGEST", "NEW")
@reporting
def tag(words: tuple[str, str, str]) -> Report:
    """Let the tag NEW name a bundle, whatever it named before."""
    from dsv2mk.artifacts.publish import check_tag, retag

    check_tag(words[2])
    store = _open(words[0])
    digest = store.resolve(words[1])
    retag(store, digest, words[2])
    return Report(data={"tag": words[2], "digest": digest}, text=f"{words[2]}: bundle {digest}")


@click.command()
@_words("STORE", "NAME|DIGEST")
@reporting
def rm(words: tuple[str, str]) -> Report:
    """Remove a tag, and its bundle if that has no other; or a bundle with all its tags.

    Objects stay until `dsv2mk gc`.
    """
    from dsv2mk.artifacts.collect import remove

    tags, digest = remove(_open(words[0]), words[1])
    lines = [f"removed: tag {name}" for name in tags]
    lines += [f"removed: bundle {digest}"] if digest else []
    return Report(data={"tags": tags, "digest": digest}, text="\n".join(lines))


@click.command()
@_words("STORE")
@click.option(
    "--grace",
    callback=_seconds,
    default="24h",
    show_default=True,
    metavar="TIME",
    help="Keep what is younger: 90s, 30m, 24h, 7d.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@reporting
def gc(words: tuple[str], grace: float, dry_run: bool) -> Report:
    """Delete objects that no bundle names, and what died publishers have left."""
    from dsv2mk.artifacts.collect import collect

    found = collect(_open(words[0]), grace, dry_run=dry_run)
    data = {
        "dry_run": dry_run,
        "bytes": found.nbytes,
        "objects": found.objects,
        "others": [str(path) for path in found.others],
        "restored": found.restored,
    }
    what = "would delete" if dry_run else "deleted"
    lines = [f"{what}: {name}" for name in [*found.objects, *map(str, found.others)]]
    lines.append(
        f"{what} {len(found.objects)} objects and {len(found.others)} other files, "
        f"{size_text(found.nbytes)}"
    )
    return Report(data=data, text="\n".join(lines))
