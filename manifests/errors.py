"""Errors that a user can mend, each with the exit code it ends a command with.

A message says what is wrong, what was expected and found, and the command that mends it. Anything
else that is raised is a bug of ours and keeps its traceback.
"""

EXIT_DONE = 0
EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_INPUT = 10
EXIT_ARTIFACT = 11
EXIT_NODE = 12
EXIT_SPACE = 13
EXIT_BUG = 70
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """Base of all errors that are reported in one line, without a traceback."""

    exit_code = EXIT_USAGE
    kind = "usage"

    def __init__(
        self,
        what: str,
        *,
        expected: object = None,
        found: object = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.expected = None if expected is None else str(expected)
        self.found = None if found is None else str(found)
        self.fix = fix

    def __str__(self) -> str:
        line = self.what
        if self.expected is not None:
            line += f": expected {self.expected}"
        if self.found is not None:
            line += f"{',' if self.expected is not None else ':'} found {self.found}"
        if self.fix is not None:
            line += f". {self.fix}"
        return " ".join(line.split())

    def to_json(self) -> dict[str, object]:
        """The error as `--json` prints it, without the absent fields."""
        fields = {
            "kind": self.kind,
            "exit_code": self.exit_code,
            "message": str(self),
            "what": self.what,
            "expected": self.expected,
            "found": self.found,
            "fix": self.fix,
        }
        return {name: value for name, value in fields.items() if value is not None}


class UsageError(UserError):
    """The command line or the state of the output folder does not allow what was asked."""


class InputError(UserError):
    """The checkpoint is missing, damaged, or of a form that is not supported."""

    exit_code = EXIT_INPUT
    kind = "input refused"


class ArtifactError(UserError):
    """An artifact is missing, damaged, or of a version that this program does not know."""

    exit_code = EXIT_ARTIFACT
    kind = "artifact damaged or missing"


class NodeError(UserError):
    """The artifact or the kernel does not fit this node: arch, driver, world size, memory."""

    exit_code = EXIT_NODE
    kind = "does not fit this node"


class StuckError(UserError):
    """The kernel's watchdog ended a launch."""

    exit_code = EXIT_BUG
    kind = "kernel stuck"


class PeerError(UserError):
    """Another rank has failed or ended."""

    exit_code = EXIT_BUG
    kind = "another rank failed"


class SpaceError(UserError):
    """A file system is, or would be, full."""

    exit_code = EXIT_SPACE
    kind = "no space"
