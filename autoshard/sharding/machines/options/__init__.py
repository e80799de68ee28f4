"""XLA's compiler options: what each does, sets of them by chip, and which sets apply to a program.

`option_table` describes single options, `option_sets` the sets, `host_memory` those for host memory. `choice` selects
and merges sets. `asynchronous` says which collectives compute can hide under them.
"""

from autoshard.sharding.machines.options.asynchronous import (
    asynchronous_kinds,
    keeps_gathers,
    keeps_reduce_scatters,
)
from autoshard.sharding.machines.options.choice import (
    UnknownSetError,
    applicable_sets,
    conflicts,
    default_options,
    machine_code_options,
    named_set,
    off_by_numerics,
    reported_numerics,
    set_names,
    sets_in,
    with_needed,
    with_set,
    without_reported,
)
from autoshard.sharding.machines.options.option_sets import SETS, OptionSet, ProgramFacts
from autoshard.sharding.machines.options.option_table import OPTIONS, Option, Options

__all__ = [
    "OPTIONS",
    "SETS",
    "Option",
    "OptionSet",
    "Options",
    "ProgramFacts",
    "UnknownSetError",
    "applicable_sets",
    "asynchronous_kinds",
    "conflicts",
    "default_options",
    "keeps_gathers",
    "keeps_reduce_scatters",
    "machine_code_options",
    "named_set",
    "off_by_numerics",
    "reported_numerics",
    "set_names",
    "sets_in",
    "with_needed",
    "with_set",
    "without_reported",
]
