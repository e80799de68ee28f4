"""Trains programs of other libraries for one step and prints the largest relative error of a gradient.

python -m tests.foreign.table                                    all programs; it takes some minutes
python -m tests.foreign.table penzai_models haiku_nets/resnet    those of one library, and one program

It needs the extra `libraries`: pip install -c requirements.lock -e '.[dev,libraries]'
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBRARIES = sorted(file.stem for file in (Path(__file__).parent / "libraries").glob("*.py"))


def programs(chosen: list[str]) -> dict[str, Callable[[], Any]]:
    """Returns the chosen programs, `library/program` -> the function that makes it; all if none is named."""
    found = {}
    for library in LIBRARIES:
        if not chosen or any(name.partition("/")[0] == library for name in chosen):
            for make in importlib.import_module(f"tests.foreign.libraries.{library}").PROGRAMS:
                name = f"{library}/{make.__name__}"
                if not chosen or library in chosen or name in chosen:
                    found[name] = make
    return found


def main() -> int:
    """Prints the table; the exit code is 1 if an error exceeds the tolerance."""
    parser = argparse.ArgumentParser(description="Compare programs of other libraries with one device.")
    parser.add_argument("programs", nargs="*", help="a library, or library/program; default: all")
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from tests.foreign import one_step

    chosen = programs(args.programs)
    if not chosen:
        parser.error(f"no program has one of these names; the libraries are {', '.join(LIBRARIES)}")
    failed, largest = False, {}
    print(f"{'program':42}{'plan':19}{'state held':>10}{'gradient':>10}{'others':>10}")
    for name, make in chosen.items():
        program = make()
        single = one_step.run(program)
        for plan in program.plans:
            sharded = one_step.run(program, plan)
            pairs = ((single.grads, sharded.grads), (single.others, sharded.others))
            grads, others = (max(one_step.errors(*pair).values()) for pair in pairs)
            largest[name] = max(largest.get(name, 0.0), grads)
            failed |= not max(grads, others) <= program.tolerance
            print(f"{name:42}{plan:19}{sharded.share:>10.0%}{grads:>10.1e}{others:>10.1e}", flush=True)
    worst = max(largest, key=lambda name: largest[name])
    count = len({name.partition("/")[0] for name in largest})
    print(
        f"{len(largest)} programs, {count} libraries; the largest error of a gradient is {largest[worst]:.1e} ({worst})"
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
