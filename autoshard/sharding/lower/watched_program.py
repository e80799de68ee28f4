"""A jitted program whose compilations, first and later ones, print no remarks of XLA on the terminal.

JAX compiles a program again if its caches were cleared, or if one of these changes: the current mesh, a setting that
does not affect the plan, or the kind of an argument (a NumPy array). Later calls only set a thread-local flag. File
descriptor 2 is redirected only when JAX is about to compile.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Sequence
from typing import Any

from autoshard import _compat
from autoshard._shown import shown
from autoshard._tracebacks import users_stacklevel
from autoshard.errors import AutoshardWarning
from autoshard.sharding.lower.compiler_remarks import Redirected, kept_remarks, remarks_text
from autoshard.sharding.lower.executable import lower_as_planned
from autoshard.sharding.program.tracing import Traced

# This thread's current call of a planned program. `is_later`: whether the program was compiled before.
# `redirected`: the redirection of file descriptor 2; None until JAX begins to compile.
_CALL = threading.local()


def _begin_redirection() -> None:
    if getattr(_CALL, "is_later", False) and _CALL.redirected is None:
        _CALL.redirected = Redirected()


@functools.cache
def _listen() -> None:
    _compat.call_when_lowered(_begin_redirection)


@shown
class WatchedProgram:
    """A jitted program, called with the arguments that `Traced.jit_arguments` gives."""

    def __init__(self, jitted: Any, traced: Traced, shardings: Sequence[Any]):
        """Watch a program.

        Args:
            jitted: the result of `Executable.jit`.
            traced: the function.
            shardings: the planned shardings of its flat inputs.
        """
        self.jitted, self.traced, self.shardings = jitted, traced, shardings
        self.is_compiled = False
        self.reported: set[str] = set()

    def __call__(self, *arguments: Any) -> Any:
        """Run the program. Remarks of a compilation become a warning, unless they were reported before."""
        if not self.is_compiled:
            with kept_remarks() as remarks:
                results = self.jitted(*arguments)
            self.is_compiled = True
            self._report(remarks)
            return results
        _listen()
        _CALL.is_later, _CALL.redirected = True, None
        try:
            results = self.jitted(*arguments)
        finally:
            _CALL.is_later = False
            remarks = _CALL.redirected.end() if _CALL.redirected is not None else []
        if remarks:
            self._report(remarks)
        return results

    def _report(self, remarks: list[str]) -> None:
        if not remarks:
            return

        def lowered_text() -> str:
            """The program's MLIR with locations."""
            return lower_as_planned(self.jitted, self.traced, self.shardings).as_text(debug_info=True)

        text = remarks_text(self.traced.name, remarks, self.traced.arguments, lowered_text)
        if text and text not in self.reported:
            self.reported.add(text)
            warnings.warn(text, AutoshardWarning, stacklevel=users_stacklevel())
