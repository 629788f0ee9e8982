"""What every command shares: `--json`, exit codes, sizes as text, progress on a terminal.

Data goes to stdout, progress and messages to stderr. With `--json` stdout holds one JSON object,
also when the command fails: `{"error": {...}}`.
"""

import errno
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import click

from dsv2mk.manifests.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_SPACE,
    EXIT_USAGE,
    UserError,
)


@dataclass(kw_only=True, slots=True)
class Report:
    """What a command has to say: the same facts as JSON and as text."""

    data: dict[str, Any]
    text: str
    exit_code: int = 0
    notes: list[str] = field(default_factory=list)  # for stderr
    silent: bool = False  # another process says it


def reporting(function: Callable[..., Report]) -> Callable[..., int]:
    """Decorate a click callback that returns a Report: adds `--json` and prints the report."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    @functools.wraps(function)
    def wrapper(*args: Any, as_json: bool, **kwargs: Any) -> int:
        report = function(*args, **kwargs)
        for note in report.notes:
            message(note)
        if not report.silent and (as_json or report.text):
            click.echo(json.dumps(report.data) if as_json else _printable(report.text))
        return report.exit_code

    return wrapper


def run(command: click.Command, args: list[str] | None = None) -> int:
    """Run a click command and return its exit code; a user's error becomes one line."""
    args = sys.argv[1:] if args is None else args
    as_json = "--json" in args
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
    try:
        code = _run(command, args, as_json)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of stdout has gone. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_USAGE
    except OSError as error:  # stdout takes no more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail(*_system_error(error), as_json=False)


def _run(command: click.Command, args: list[str], as_json: bool) -> int:
    try:
        code: int | None = command.main(args, prog_name="dsv2mk", standalone_mode=False)
        return code or 0
    except UserError as error:
        return _fail(error.exit_code, error.to_json(), as_json)
    except click.ClickException as error:
        if not as_json:
            error.show()
            return EXIT_USAGE
        text = error.format_message()
        return _fail(EXIT_USAGE, {"kind": "usage", "message": text}, as_json)
    except (KeyboardInterrupt, click.Abort):
        fields = {"kind": "interrupted", "message": "interrupted"}
        return _fail(EXIT_INTERRUPTED, fields, as_json)
    except SystemExit:  # click's answer to a reader that has gone
        raise BrokenPipeError from None
    except BrokenPipeError:
        raise
    except OSError as error:
        return _fail(*_system_error(error), as_json)
    except Exception as error:
        traceback.print_exc()
        fields = {"kind": "bug", "message": f"this is a bug of dsv2mk: {error!r}"}
        return _fail(EXIT_BUG, fields, as_json)


def _system_error(error: OSError) -> tuple[int, dict[str, str]]:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    where = f": {error.filename}" if error.filename else ""
    kind, code = ("no space", EXIT_SPACE) if full else ("usage", EXIT_USAGE)
    return code, {"kind": kind, "message": f"{error.strerror or error}{where}"}


def message(text: str) -> None:
    """A line on stderr."""
    click.echo(_printable(text), err=True)


def _printable(text: str) -> str:
    """Text that any terminal takes: a path may hold bytes that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def progress(total: int, what: str, initial: int = 0, *, silent: bool = False) -> Any:
    """A tqdm bar of bytes on stderr: amount, rate and time left; silent if that is no terminal.

    `initial` bytes were done before; they do not count for the rate.
    """
    from tqdm import tqdm

    return tqdm(
        total=total,
        initial=initial,
        desc=what,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=silent or not sys.stderr.isatty(),
        smoothing=0.05,
    )


def size_text(count: float) -> str:
    """Bytes in decimal units, three digits: 5.02 GB."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    digits = 0 if unit == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {unit}"


def table_text(rows: list[list[str]], right: frozenset[int] = frozenset()) -> str:
    """Rows as columns of equal width, two spaces apart; `right` columns are right-aligned."""
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def _fail(code: int, fields: Mapping[str, object], as_json: bool) -> int:
    if as_json:
        error = {"exit_code": code, **fields}
        click.echo(json.dumps({"error": error}))
    else:
        message(f"dsv2mk: {fields['message']}")
    return code
