"""The `autoshard` command. Only the subcommands that need JAX import it, so that help is instant."""

from __future__ import annotations

import difflib
import importlib
import sys
import warnings
from collections.abc import Sequence

from autoshard import __version__
from autoshard.commands.absent_accelerators import skip_absent_accelerators
from autoshard.errors import AutoshardError, AutoshardWarning

COMMANDS = {
    "train": "train a model on text, under a plan",
    "launch": "start `train` on several hosts: here, over SSH, Slurm, GKE or SkyPilot",
    "plan": "show the plan of a train step, for this machine or another",
    "rules": "list the sharding rule of each operator",
    "ckpt": "inspect, compare, copy, remove and export checkpoints",
    "generate": "sample text from a trained model",
    "report": "write one HTML page of a run",
    "profile": "compare the trace of a run with its plan",
    "bench": "time a train step under its plan against hand-written jax.jit",
}

_HELP = f"""usage: autoshard COMMAND [OPTIONS]

A program written for one device, trained on many.

commands:
{chr(10).join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())}

options:
  -h, --help  show this help; after a command, the command's help
  --version   show the version

example:
  autoshard train --preset quick --data FILE.txt --plan fsdp:8
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments after the program's name. None takes those of this process.

    Returns:
        The exit code: the command's own; 2 for an unknown command, wrong arguments or unusable input; 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"autoshard {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else "."
        known = ", ".join(COMMANDS)
        what = "option" if name.startswith("-") else "command"
        print(f"autoshard: error: unknown {what} {name!r}{hint} The commands are: {known}", file=sys.stderr)
        return 2
    return _run(name, rest)


def _run(name: str, arguments: Sequence[str]) -> int:
    warnings.showwarning = _WarningsShownOnce()
    skip_absent_accelerators()
    try:
        return importlib.import_module(f"autoshard.commands.{name}").run(arguments)
    except AutoshardError as error:
        print(f"autoshard {name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"autoshard {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, closed the pipe
        sys.stderr.close()
        return 0


class _WarningsShownOnce:
    """Prints each warning as one line, without its source line, which does not help a user of the command."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def __call__(self, message: Warning | str, category: type[Warning], *_: object) -> None:
        is_for_users = issubclass(category, (AutoshardWarning, FutureWarning))
        text = f"{'' if is_for_users else f'{category.__name__}: '}{message}"
        if text not in self._shown:  # a command may plan several variants of a program
            self._shown.add(text)
            print(f"autoshard: warning: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
