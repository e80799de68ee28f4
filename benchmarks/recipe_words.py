"""The words of recipes: shardings, what a layer keeps for its backward pass, and settings in notes.

Sharding:

    sharding   clause {", " clause}
    clause     word {" " word} [", as " size {" x " size}] [" within a slice" | " across"] [" (" remark ")"]
    word       KIND:N with a kind of the planner's strategies: dp, zero1, fsdp, cp, ep, tp
    remark     "two devices a chip" | N " cores" | N " hosts x " N

`across` and `within a slice` place the words of their clause over slices (or groups of hosts), and inside of one. Their
sizes are checked against the machine. The planner assigns devices in the order of `Sharding.words`, outermost first.

Remat:

    remat      "none", a policy of MaxText, such as "full", or item {(", " | "; ") item}
    item       name [[":"] action]; a name without an action has that of the next item that has one
    name       one of MaxText's or ours (`NAMES`), or several with a common end: "query/key/value_proj"
    action     "host" | "kept" | "recomputed"
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import common  # noqa: F401  sets up the path first

from autoshard.sharding.layout.plan_request import KINDS

Action = Literal["keep", "host", "recompute"]

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "decoder_layer_input": "residual",
        "query_proj": "query",
        "key_proj": "key",
        "value_proj": "value",
        "qkv_proj": "qkv",
        "context": "context",
        "out_proj": "out_proj",
        "mlpwi": "mlp_in",
        "mlpwi_0": "mlp_in",
        "mlpwi_1": "mlp_in",
        "mlpwo": "mlp_out",
    }
)
"""MaxText's names of a decoder layer's values, and ours."""

VALUES = ("residual", "qkv", "context", "out_proj", "mlp_in", "mlp_out")
"""Our names, in the order of the layer. `qkv` is `query`, `key` and `value` together."""

_PROJECTIONS = ("qkv", "out_proj", "mlp_in", "mlp_out")


def _all(action: Action, *names: str) -> Mapping[str, Action]:
    return dict.fromkeys(names, action)


# MaxText's `get_remat_policy`. Its "minimal" policies name no values: they keep the results of all projections.
POLICIES: Mapping[str, Mapping[str, Action]] = MappingProxyType(
    {
        "full": {},
        "minimal": _all("keep", *_PROJECTIONS),
        "minimal_flash": _all("keep", *_PROJECTIONS, "context"),
        "minimal_offloaded": _all("host", *_PROJECTIONS),
        "save_qkv_proj": _all("keep", "qkv"),
        "save_out_proj": _all("keep", "out_proj"),
        "save_dot_except_mlp": _all("keep", "qkv", "out_proj"),
        "save_dot_except_mlpwi": _all("keep", "qkv", "out_proj", "mlp_out"),
        "save_dot_with_context_except_mlp": _all("keep", "qkv", "context", "out_proj"),
        "qkv_proj_offloaded": _all("host", "qkv"),
    }
)
_PHRASES = {"dots and context kept, but not those of the mlp": "save_dot_with_context_except_mlp"}
_ACTIONS: Mapping[str, Action] = {"host": "host", "kept": "keep", "recomputed": "recompute"}


class WordsError(ValueError):
    """Words of a recipe that the grammar does not have."""


@dataclass(frozen=True)
class Sharding:
    """The mesh of a recipe.

    Attributes:
        sizes: kind of parallelism -> devices.
    """

    sizes: Mapping[str, int]

    @property
    def words(self) -> str:
        """The strategy in the planner's words, outermost first."""
        return " ".join(f"{kind}:{self.sizes[kind]}" for kind in KINDS if kind in self.sizes)


_WORD = r"[a-z]\w*:\d+"
_CLAUSE = re.compile(
    rf"(?P<words>{_WORD}(?: {_WORD})*)(?:, as (?P<parts>\d+(?: x \d+)*))?"
    r"(?: (?P<place>within a slice|across))?(?: \((?P<remark>[^()]*)\))?(?:, |$)"
)


def parse_sharding(text: str, *, devices: int, slices: int = 1, devices_per_chip: int = 1) -> Sharding:
    """Parse a recipe's sharding and check it against its machine.

    Args:
        text: the words.
        devices: devices of the whole machine.
        slices: its slices.
        devices_per_chip: devices of a chip.

    Raises:
        WordsError: the text is not in the grammar, or contradicts the machine.
    """
    sizes: dict[str, int] = {}
    at = 0
    while at < len(text):
        found = _CLAUSE.match(text, at)
        if not found:
            raise WordsError(f"sharding {text!r}: {text[at:]!r} is not understood")
        words: dict[str, int] = {}
        for kind, number in (word.split(":") for word in found["words"].split()):
            if kind not in KINDS:
                raise WordsError(f"sharding {text!r}: {kind!r} is not one of {', '.join(KINDS)}")
            if kind in sizes | words:
                raise WordsError(f"sharding {text!r}: {kind!r} occurs twice")
            words[kind] = int(number)
        size = math.prod(words.values())
        if found["parts"] and math.prod(map(int, found["parts"].split(" x "))) != size:
            raise WordsError(f"sharding {text!r}: {found['parts']!r} is not {size}")
        if slices > 1 and found["place"] and size != (slices if found["place"] == "across" else devices // slices):
            raise WordsError(f"sharding {text!r}: {size} devices are not {found['place']} on {slices} slices")
        _check_remark(text, found["remark"], size, devices, devices_per_chip)
        sizes |= words
        at = found.end()
    if math.prod(sizes.values()) != devices or not sizes:
        raise WordsError(f"sharding {text!r} is for {math.prod(sizes.values())} devices; the machine has {devices}")
    return Sharding(sizes)


def _check_remark(text: str, remark: str | None, size: int, devices: int, devices_per_chip: int) -> None:
    if remark is None:
        return
    if remark == "two devices a chip":
        right = devices_per_chip == 2
    elif found := re.fullmatch(r"(\d+) cores", remark):
        right = int(found[1]) == devices
    elif found := re.fullmatch(r"(\d+) hosts x (\d+)", remark):
        right = int(found[1]) * int(found[2]) == size
    else:
        raise WordsError(f"sharding {text!r}: the remark {remark!r} is not understood")
    if not right:
        raise WordsError(f"sharding {text!r}: the remark {remark!r} contradicts the machine of {devices} devices")


@dataclass(frozen=True)
class Remat:
    """What a layer's forward pass does with its values.

    Attributes:
        actions: our name -> `keep` (on the device), `host` or `recompute`. Values without an action are recomputed,
            except `residual`: the layer's input is kept on the device, because the recomputation starts from it.
        recomputes: whether anything is recomputed. If not, every value is kept, with or without a name.
    """

    actions: Mapping[str, Action]
    recomputes: bool = True

    def names(self, action: Action) -> tuple[str, ...]:
        """The names with this action, in the order of the layer."""
        order = ("residual", "qkv", "query", "key", "value", *VALUES[2:])
        return tuple(name for name in order if self.actions.get(name) == action)

    def __str__(self) -> str:
        if not self.recomputes:
            return "none"
        named = {action: self.names(action) for action in ("host", "keep", "recompute")}
        parts = [f"{', '.join(names)}: {action}" for action, names in named.items() if names]
        return "; ".join(parts) or "full"


def parse_remat(text: str) -> Remat:
    """Parse a recipe's remat.

    Raises:
        WordsError: the text is not in the grammar.

    >>> str(parse_remat("decoder_layer_input, query/key/value_proj: host; mlpwo kept"))
    'residual, qkv: host; mlp_out: keep'
    """
    policy = _PHRASES.get(text, text)
    if policy == "none":
        return Remat(_all("keep", *VALUES), recomputes=False)
    if policy in POLICIES:
        return Remat(POLICIES[policy])
    actions: dict[str, Action] = {}
    waiting: list[str] = []
    for item in re.split(r"[,;] ", text):
        found = re.fullmatch(r"(?P<name>[\w/]+)(?::? (?P<action>host|kept|recomputed))?", item)
        if not found:
            raise WordsError(f"remat {text!r}: {item!r} is not understood")
        waiting += _expanded(found["name"], text)
        if found["action"]:
            for name in waiting:
                if actions.setdefault(name, _ACTIONS[found["action"]]) != _ACTIONS[found["action"]]:
                    raise WordsError(f"remat {text!r}: {name} has two actions")
            waiting = []
    if waiting:
        raise WordsError(f"remat {text!r}: {', '.join(waiting)} has no action; write host, kept or recomputed")
    query = actions.get("query")
    if query and query == actions.get("key") == actions.get("value"):
        actions = {name: action for name, action in actions.items() if name not in ("query", "key", "value")}
        actions["qkv"] = query
    return Remat(actions)


def _expanded(name: str, text: str) -> list[str]:
    """Our names of `query/key/value_proj`, `mlpwo` or `qkv`."""
    *first, last = name.split("/")
    ends = [each if each in NAMES else f"{each}_{last.rpartition('_')[2]}" for each in first] + [last]
    own = {*VALUES, "query", "key", "value"}
    for each in ends:
        if each not in NAMES and each not in own:
            raise WordsError(f"remat {text!r}: there is no value {each!r}; there are {', '.join(NAMES)}")
    return [NAMES.get(each, each) for each in ends]


def parse_note(note: str) -> dict[str, Any]:
    """Find settings of a recipe in its note.

    >>> parse_note("dropped tokens, capacity factor 1.25, dense one-hot dispatch, parameters in bf16")
    {'dispatch': 'capacity', 'capacity_factor': 1.25, 'param_dtype': 'bfloat16'}
    """
    found: dict[str, Any] = {}
    if re.search(r"\bdropped tokens\b", note):
        found["dispatch"] = "capacity"
    elif re.search(r"\bdropless\b", note):
        found["dispatch"] = "dropless"
    if factor := re.search(r"\bcapacity factor (\d+(?:\.\d+)?)\b", note):
        found["capacity_factor"] = float(factor[1])
    if dtype := re.search(r"\bparameters in (bf16|f32)\b", note):
        found["param_dtype"] = {"bf16": "bfloat16", "f32": "float32"}[dtype[1]]
    return found
