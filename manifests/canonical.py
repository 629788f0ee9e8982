"""JSON as it is stored and as it is read: one form for equal values, one error for bad input."""

import json
import re
from collections.abc import Mapping
from typing import Any

#: Names of files in an artifact's folder: plain, and never a way out of it.
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def canonical_json(data: object) -> bytes:
    """Sorted keys, no white space, UTF-8, no floats (ValueError)."""
    _refuse_floats(data)
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8")


def parse_object(encoded: bytes) -> dict[str, Any]:
    """A JSON object in UTF-8. Raises ValueError, whose text completes "the file is ..."."""
    try:
        data = json.loads(encoded.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON in UTF-8: {error}") from None
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    return data


def _refuse_floats(data: object) -> None:
    if isinstance(data, float):
        raise ValueError(f"a float in canonical JSON: {data!r}")
    if isinstance(data, Mapping):
        for key, value in data.items():
            if not isinstance(key, str):
                raise ValueError(f"a key that is not text: {key!r}")
            _refuse_floats(value)
    elif isinstance(data, list | tuple):
        for value in data:
            _refuse_floats(value)
