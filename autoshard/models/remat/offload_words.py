"""The words of `offload`: which named values of a layer wait in the host's memory.

    offload = "none" | "auto" | name {("+" | ",") name}

A name is ours or MaxText's (`named_values.NAMED_VALUES`). Some of MaxText's names stand for a part of one of our
values: `query_proj` is `qkv`, all of it.
"""

from __future__ import annotations

import re

from autoshard.models.remat.named_values import NAMED_VALUES
from autoshard.models.remat.policies import HOST

AUTO, NONE = "auto", "none"


def offloaded_names(offload: str) -> tuple[str, ...]:
    """Return our names of the values that a text other than `auto` moves to the host, in the order of a layer.

    Args:
        offload: the text.

    Raises:
        ValueError: a name is unknown; the message lists the known ones.

    >>> offloaded_names("decoder_layer_input, query_proj, key_proj, value_proj")
    ('residual', 'qkv')
    >>> offloaded_names("none")
    ()
    """
    if offload.strip() == NONE:
        return ()
    ours = {also: name for name, value in NAMED_VALUES.items() for also in (name, *value.maxtext)}
    given = [part.strip() for part in re.split(r"[+,]", offload)]
    unknown = [name for name in given if name not in ours]
    if unknown:
        known = ", ".join(f"{name} ({', '.join(v.maxtext)})" if v.maxtext != (name,) else name
                          for name, v in NAMED_VALUES.items())  # fmt: skip
        raise ValueError(
            f"offload is {offload!r}; {unknown[0]!r} is not a named value. Give {NONE}, {AUTO}, or names of a layer's "
            f"values joined by '+': {known}"
        )
    found = {ours[name] for name in given}
    return tuple(name for name in NAMED_VALUES if name in found)


def offload_remat(offload: str) -> str:
    """Return the `remat` under which the named values wait on the host and all others are recomputed.

    Args:
        offload: names, not `auto` or `none`.

    Raises:
        ValueError: a name is unknown.

    >>> offload_remat("residual+qkv")
    'host:residual+qkv'
    """
    return f"{HOST}:{'+'.join(offloaded_names(offload))}"
