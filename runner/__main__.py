"""`python -m dsv2mk.runner`: the commands of the node, without the rest."""

import sys

import click

from dsv2mk.artifacts import console
from dsv2mk.runner.commands import bench, gate, generate


@click.group()
def cli() -> None:
    """Decode, measure and check on a node: no compiler, no checkpoint."""


for command in (generate, bench, gate):
    cli.add_command(command)

if __name__ == "__main__":
    sys.exit(console.run(cli))
