"""The `autoshard` command. JAX is imported by the subcommand that needs it, so that help is instant."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence

from autoshard.errors import AutoshardError

COMMANDS = {
    "train": "train a model on text, under a plan",
    "plan": "show the plan of a train step, for this machine or another",
    "rules": "list what is known about each operator",
    "ckpt": "look at checkpoints, compare, copy, remove and export them",
    "generate": "sample text from a trained model",
    "bench": "time a train step under its plan against hand-written jax.jit",
}

_HELP = f"""usage: autoshard COMMAND [OPTIONS]

A program written for one device, trained on many.

commands:
{chr(10).join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())}

options:
  -h, --help  show this help, or that of a command
  --version   show the version

example:
  autoshard train --preset quick --data FILE.txt --plan fsdp:8
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows the program's name; those of this process where None.

    Returns:
        The exit code: 0, 2 where the command was used wrongly or on something that cannot be used.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"autoshard {_version()}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"autoshard: error: unknown command {name!r}: known are {known}", file=sys.stderr)
        return 2
    return _run(name, rest)


def _run(name: str, arguments: Sequence[str]) -> int:
    warnings.showwarning = _show_warning
    try:
        return importlib.import_module(f"autoshard.commands.{name}").run(arguments)
    except AutoshardError as error:
        print(f"autoshard {name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"autoshard {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        sys.stderr.close()
        return 0


def _show_warning(message: Warning | str, category: type[Warning], *_: object) -> None:
    """A warning as one line; where in our code it was raised is nothing to a user of the command."""
    print(f"autoshard: {category.__name__}: {message}", file=sys.stderr)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("autoshard")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
