"""Finds the values that a forward pass leaves for its backward pass, and the words of `offload=` that move them.

    crosses(v)   = an equation of the forward pass makes v, and an equation of the backward pass takes it
    word of v    = a name that `checkpoint_name` gave to v, or to a value that v equals up to casts and reshapes;
                   `residual`, if v is the carry at the beginning of an iteration of a scan over parameters, and the
                   program gives this name to no value

In straight code v is a variable of one jaxpr. In scanned code it is an output of the forward scan's body, and the stack
of all iterations is a result of the forward scan that the backward scan takes slice by slice. The two passes stand in
one jaxpr: the step's, or the body of a loop over microbatches. A value that `jax.checkpoint` recomputes does not
cross.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.offload.constants import SMALLEST_BYTES
from autoshard.sharding.offload.edits import Edits, has_backward, jaxprs_of
from autoshard.sharding.offload.layer_words import LayerWord
from autoshard.sharding.offload.words import RESIDUAL
from autoshard.sharding.program.array_sizes import is_float, nbytes

# Operators whose result is their operand in another type or shape.
_SAME_VALUE = (
    "convert_element_type", "copy", "copy_p", "expand_dims", "reduce_precision", "reshape", "squeeze", "transpose",
)  # fmt: skip

Labels = dict[Any, set[str]]


@shown
@dataclass
class Crossings:
    """What crosses from the forward to the backward pass of one program.

    Attributes:
        edits: the changes that move the chosen values.
        nbytes: word -> bytes of its moved values in one step, before sharding.
        reasons: word -> why some of its values that cross stay on the device.
        in_scans: word with a slice over layers -> the scans in which it cannot select iterations.
        names: the names that `checkpoint_name` gave, anywhere in the program.
        counts: name -> the number of its values in straight code, which a slice over layers counts.
        recomputed: the names of values that `jax.checkpoint` computes again.
        has_backward: whether the program has a backward pass.
    """

    edits: Edits = field(default_factory=Edits)
    nbytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reasons: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    in_scans: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    names: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    recomputed: set[str] = field(default_factory=set)
    has_backward: bool = False


def find_crossings(closed: Any, words: Sequence[LayerWord] | None = None) -> Crossings:
    """Find the values of the chosen words that cross in a program.

    Args:
        closed: the program, with its calls inlined.
        words: the words whose values are moved. By default, each name is a word.
    """
    found = Crossings()
    _collect_names(closed, found, in_checkpoint=False)
    found.edits = _Level(closed, words, found, 1.0).edits()
    return found


def _collect_names(closed: Any, found: Crossings, in_checkpoint: bool) -> None:
    for eqn in _compat.open_jaxpr(closed).eqns:
        found.has_backward |= _compat.is_transposed(eqn)
        if eqn.primitive.name == "name":
            found.names.add(eqn.params["name"])
            if in_checkpoint:
                found.recomputed.add(eqn.params["name"])
        inside = in_checkpoint or (eqn.primitive.name == "remat2" and bool(eqn.params.get("differentiated")))
        for inner in jaxprs_of(eqn):
            _collect_names(inner, found, inside)


class _Level:
    """The crossings of one jaxpr that contains a forward and a backward pass, and of those within its loops."""

    def __init__(self, closed: Any, words: Sequence[LayerWord] | None, found: Crossings, trips: float):
        self.jaxpr, self.words, self.found, self.trips = _compat.open_jaxpr(closed), words, found, trips
        self.canonical, self.labels = labelled(self.jaxpr)
        self.numbers = _Numbers(self.jaxpr, self.canonical)
        for name, values in self.numbers.named.items():
            found.counts[name] = max(len(values), found.counts.get(name, 0))
        self.made_by = {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}
        # variable -> the equations that take it; canonical variable -> whether the backward pass takes it
        self.users: dict[Any, list[Any]] = defaultdict(list)
        self.crosses: set[Any] = set()
        for eqn in self.jaxpr.eqns:
            for atom in eqn.invars:
                if not isinstance(atom, _compat.Literal):
                    self.users[atom].append(eqn)
                    if _compat.is_transposed(eqn):
                        self.crosses.add(self.canonical.get(atom, atom))

    def edits(self) -> Edits:
        edits = Edits(self.canonical)
        for var in [v for v in self.labels if v in self.crosses]:
            words = self.chosen_words(self.labels[var], var)
            eqn = self.made_by.get(var)
            if not words or self.is_small(words, var):
                continue
            if eqn is None:
                self.refuse(words, "it is an input of the step, or of the loop around it")
            elif not _compat.is_transposed(eqn):
                edits.kept.add(var)
                self.count(words, nbytes(var.aval))
        for eqn in self.jaxpr.eqns:
            if _compat.is_transposed(eqn):
                continue
            if eqn.primitive.name == "scan" and any(var in self.crosses for var in eqn.outvars):
                self.stacks(eqn, edits)
            elif eqn.primitive.name in ("scan", "while", "cond") and has_backward(eqn):
                for number, inner in enumerate(_inner_jaxprs(eqn)):
                    trips = self.trips * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
                    edits.inner[id(eqn), number] = _Level(inner, self.words, self.found, trips).edits()
        return edits

    def stacks(self, eqn: Any, edits: Edits) -> None:
        """Choose the stacked results of a forward scan that its body moves to the host."""
        params = eqn.params
        body = _compat.open_jaxpr(params["jaxpr"])
        n_consts, n_carry = _compat.scan_arity(params)
        has_residual = RESIDUAL not in self.found.names and self.is_over_parameters(eqn, n_consts + n_carry)
        carry = body.invars[n_consts : n_consts + n_carry] if has_residual else []
        canonical, labels = labelled(body, {var: {RESIDUAL} for var in carry})
        stored: dict[Any, list[int]] = defaultdict(list)
        for k, (var, atom) in enumerate(zip(eqn.outvars[n_carry:], body.outvars[n_carry:], strict=True)):
            if isinstance(atom, _compat.Literal) or var not in self.crosses:
                continue
            source = canonical.get(atom, atom)
            words = self.stacked_words(labels.get(source, ()), eqn)
            if not words or self.is_small(words, source):
                continue
            if params["length"] < 2:
                self.refuse(words, "its scan has one iteration, so the backward pass takes it at once")
                continue
            if any(not _compat.is_transposed(user) for user in self.users[var]) or var in self.jaxpr.outvars:
                self.refuse(words, "the forward pass, or a result of the step, uses the stack of all layers too")
                continue
            if not stored[source]:
                self.count(words, nbytes(var.aval))
            stored[source].append(k)
        if stored:
            edits.stacks[id(eqn)] = {k for some in stored.values() for k in some}
            edits.inner[id(eqn), 0] = Edits(canonical)

    def is_over_parameters(self, eqn: Any, first: int) -> bool:
        """Whether a scan runs over stacked parameters: floating-point inputs of the jaxpr, up to casts and reshapes."""
        for atom in eqn.invars[first:]:
            while not isinstance(atom, _compat.Literal) and (made_by := self.made_by.get(atom)) is not None:
                if made_by.primitive.name not in (*_SAME_VALUE, "name", "slice", "sharding_constraint"):
                    break
                atom = made_by.invars[0]
            else:
                if not isinstance(atom, _compat.Literal) and is_float(atom.aval):
                    return True
        return False

    def chosen_words(self, names: Iterable[str], var: Any) -> list[str]:
        """The words that select a value of straight code with these names."""
        if self.words is None:
            return sorted(names)
        return [
            word.text
            for word in self.words
            if any(word.names(name) and word.covers(*self.numbers.of(name, var)) for name in names)
        ]

    def stacked_words(self, names: Iterable[str], scan: Any) -> list[str]:
        """The words that select a value with these names in each iteration of a scan."""
        if self.words is None:
            return sorted(names)
        found = [word for word in self.words if any(map(word.names, names))]
        if some := [word.text for word in found if word.layers is not None]:
            line = _compat.source_line(scan)
            reason = (
                f"its layers are one scan of {scan.params['length']} iterations{f' at {line}' if line else ''}, whose "
                "body is the same for all of them. Leave the slice out, or write the layers out one after the other"
            )
            for word in some:
                if reason not in self.found.in_scans[word]:
                    self.found.in_scans[word].append(reason)
        return [word.text for word in found if word.layers is None]

    def is_small(self, words: list[str], var: Any) -> bool:
        if nbytes(var.aval) >= SMALLEST_BYTES and not _compat.is_extended(var.aval.dtype):
            return False
        size = nbytes(var.aval)
        self.refuse(words, f"it has {size} bytes; fewer than {SMALLEST_BYTES} are not worth a transfer")
        return True

    def count(self, words: list[str], size: float) -> None:
        for word in words:
            self.found.nbytes[word] += size * self.trips

    def refuse(self, words: list[str], reason: str) -> None:
        for word in words:
            if reason not in self.found.reasons[word]:
                self.found.reasons[word].append(reason)


class _Numbers:
    """The values of each name in straight code, in the order in which the forward pass computes them."""

    def __init__(self, jaxpr: Any, canonical: Mapping[Any, Any]):
        self.named: dict[str, list[Any]] = defaultdict(list)
        self.source: dict[Any, Any] = {}
        for eqn in jaxpr.eqns:
            if _compat.is_transposed(eqn) or not eqn.invars or isinstance(eqn.invars[0], _compat.Literal):
                continue
            source = canonical.get(eqn.invars[0], eqn.invars[0])
            if eqn.primitive.name == "name" and source not in self.named[eqn.params["name"]]:
                self.named[eqn.params["name"]].append(source)
            elif eqn.primitive.name in _SAME_VALUE:
                self.source[eqn.outvars[0]] = self.source.get(source, source)

    def of(self, name: str, var: Any) -> tuple[int, int]:
        """The number of a value among those of a name, and how many there are."""
        found = self.named[name]
        return found.index(self.source.get(var, var)), len(found)


def labelled(jaxpr: Any, labels: Labels | None = None) -> tuple[dict[Any, Any], Labels]:
    """Return the canonical variables of a forward pass, and the words of each canonical variable.

    Args:
        jaxpr: the jaxpr.
        labels: words of some variables to start from.
    """
    canonical: dict[Any, Any] = {}
    found: Labels = {var: set(words) for var, words in (labels or {}).items()}
    forward = [eqn for eqn in jaxpr.eqns if not _compat.is_transposed(eqn)]
    for eqn in forward:
        if eqn.primitive.name == "name" and not isinstance(eqn.invars[0], _compat.Literal):
            source = canonical.get(eqn.invars[0], eqn.invars[0])
            canonical[eqn.outvars[0]] = source
            found.setdefault(source, set()).add(eqn.params["name"])
    for eqn in forward:
        if eqn.primitive.name in _SAME_VALUE and not isinstance(eqn.invars[0], _compat.Literal):
            source = canonical.get(eqn.invars[0], eqn.invars[0])
            if source in found:
                found.setdefault(eqn.outvars[0], set()).update(found[source])
    return canonical, found


def _inner_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs within a loop or branch, in the order in which `replay` counts them."""
    if eqn.primitive.name == "cond":
        return list(eqn.params["branches"])
    return [eqn.params["body_jaxpr" if eqn.primitive.name == "while" else "jaxpr"]]
