"""The `dsv2mk` command. A subcommand's module is imported only when it is called for."""

import importlib
import sys
from importlib import metadata

import click

from dsv2mk.artifacts import console

#: Name -> (where it is, its line in `dsv2mk --help`).
COMMANDS = {
    "synth": ("dsv2mk.pipeline.commands", "Make a random checkpoint in Hugging Face form."),
    "plan": ("dsv2mk.pipeline.commands", "Show what a build would make; reads no tensor data."),
    "build": ("dsv2mk.pipeline.commands", "Build an artifact from a checkpoint."),
    "verify": ("dsv2mk.artifacts.commands", "Check an artifact or a store against its hashes."),
    "inspect": ("dsv2mk.artifacts.commands", "Show what an artifact holds."),
    "diff": ("dsv2mk.artifacts.commands", "Compare two artifacts."),
    "publish": ("dsv2mk.artifacts.store_commands", "Put an artifact into a store."),
    "pull": ("dsv2mk.artifacts.store_commands", "Copy an artifact out of a store."),
    "ls": ("dsv2mk.artifacts.store_commands", "List what a store holds."),
    "tag": ("dsv2mk.artifacts.store_commands", "Give a bundle of a store another name."),
    "rm": ("dsv2mk.artifacts.store_commands", "Remove a tag or a bundle from a store."),
    "gc": ("dsv2mk.artifacts.store_commands", "Delete what no bundle of a store names."),
    "keygen": ("dsv2mk.artifacts.signing", "Make a key pair to sign bundles with."),
    "cubin": ("dsv2mk.pipeline.cubin", "Compile the kernel; needs no GPU."),
    "generate": ("dsv2mk.runner.commands", "Decode greedily from an artifact."),
    "bench": ("dsv2mk.runner.commands", "Measure milliseconds a token on a GPU."),
    "gate": ("dsv2mk.runner.commands", "Check a decoder's numbers against a reference."),
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.command(cls=_Lazy)
@click.version_option(metadata.version("dsv2mk"), message="dsv2mk %(version)s")
def cli() -> None:
    """Decode DeepSeek-V2 at batch size 1: checkpoint to block-FP8 artifacts to tokens.

    Exit codes: 0 done, 1 a check failed, 2 usage, 10 input refused, 11 artifact damaged or
    missing, 12 does not fit this node, 13 no space, 70 a bug of dsv2mk, 130 interrupted.
    """


def main() -> None:
    """Entry point."""
    sys.exit(console.run(cli))
