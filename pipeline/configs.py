"""Geometries by name, for commands that need no checkpoint."""

from pathlib import Path
from typing import Any

from dsv2mk.manifests.canonical import parse_object
from dsv2mk.manifests.errors import InputError
from dsv2mk.manifests.geometry import preset_config, preset_names


def named_config(geometry: str, layers: int | None = None) -> dict[str, Any]:
    """config.json of a preset or of a file, with this many layers instead of its own.

    Raises UsageError for an unknown name, InputError for a file that cannot be read.
    """
    path = Path(geometry)
    if not geometry or geometry in preset_names() or not path.exists():
        config = preset_config(geometry)
    else:
        if not path.is_file():  # a pipe would wait for ever
            raise InputError(f"{path} is not a file")
        try:
            config = parse_object(path.read_bytes())
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        except ValueError as error:
            raise InputError(f"{path} is {error}") from None
    if layers is not None:
        config["num_hidden_layers"] = layers
        dense = config.get("first_k_dense_replace")
        if isinstance(dense, int):
            config["first_k_dense_replace"] = min(dense, layers)
    return config
