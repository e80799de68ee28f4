"""A digest of a compiled program that does not depend on its source lines."""

from __future__ import annotations

import hashlib
import re

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_METADATA = re.compile(rf', metadata=\{{(?:[^{{}}"]|{_QUOTED})*\}}')
# The computations follow tables of files, functions and stack frames.
_FIRST_COMPUTATION = re.compile(r"^(?:ENTRY )?%?[\w.$-]+ .*\{$", re.MULTILINE)


def program_digest(text: str) -> str:
    r"""A digest of the scheduled HLO without metadata, the module's name and the tables of source lines.

    >>> a = 'HloModule a\n\nENTRY %main (x: f32[]) -> f32[] {\n ROOT %y = add(x, x), metadata={op_name="{g}"}\n}'
    >>> program_digest(a) == program_digest(a.replace("{g}", "h").replace("HloModule a", "HloModule b"))
    True
    >>> program_digest(a) == program_digest(a.replace("add", "multiply"))
    False
    """
    first = _FIRST_COMPUTATION.search(text)
    body = _METADATA.sub("", text[first.start() :] if first else text)
    return hashlib.sha256(body.encode()).hexdigest()[:16]
