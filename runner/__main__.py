"""`python -m dsv2mk.runner`: the commands of the node, without the rest."""

import sys
from typing import Any

import click

from dsv2mk.artifacts import console
from dsv2mk.artifacts.commands import verify
from dsv2mk.artifacts.store_commands import ls, pull
from dsv2mk.runner.commands import bench, gate, generate


class _Program(click.Group):
    """Calls itself as it was called, not as `console.run` would."""

    def main(self, *args: Any, **given: Any) -> Any:
        return super().main(*args, **{**given, "prog_name": "python -m dsv2mk.runner"})


@click.group(cls=_Program)
def cli() -> None:
    """Decode, measure and check on a node: no compiler, no checkpoint."""


for command in (generate, bench, gate, pull, ls, verify):
    cli.add_command(command)

if __name__ == "__main__":
    sys.exit(console.run(cli))
