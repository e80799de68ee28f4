"""What to restore, the match of saved and requested leaves, and the record of a restore."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from autoshard._columns import LINES_SHOWN, listing
from autoshard._shown import shown
from autoshard._units import bytes_text
from autoshard.ckpt.restore.expert_remapping import Change
from autoshard.ckpt.state.named_leaves import Key, LeafSpec, castable, dtype_text, leaf_spec
from autoshard.ckpt.state.target_shardings import placement_errors
from autoshard.ckpt.store.argument_checks import dim_errors, expert_errors, mapping_errors, raise_errors
from autoshard.errors import CheckpointError, MismatchError


@shown
@dataclass(frozen=True)
class RestoreRequest:
    """What to restore, and which differences between the checkpoint and the template are allowed.

    Attributes:
        template: the template of the state; None for the whole saved state, by paths.
        shardings: shardings that replace those of the template.
        config: the config to compare with the saved one.
        allow_cast: whether leaves of another dtype are cast, integers to integers and floats to floats.
        partial: whether leaves that were not saved keep the template's values, and saved leaves that the template does
            not have are not read.
        rename: saved -> requested path or path prefix. With `*/` before both, matches levels in the middle of paths.
        experts: the numbers of the requested experts, in this order; None for all.
        upcycle: patterns of requested paths -> dimension of experts, for leaves that are copies of a dense layer.
        expert_dims: patterns of saved paths -> dimension of experts, for leaves for which the checkpoint has none.
    """

    template: Any = None
    shardings: Any = None
    config: Mapping[str, Any] | None = None
    allow_cast: bool = False
    partial: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)
    experts: Sequence[int] | None = None
    upcycle: Mapping[str, int] = field(default_factory=dict)
    expert_dims: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the types of the arguments.

        Raises:
            CheckpointError: naming each invalid argument.
        """
        errors = [] if self.config is None else mapping_errors("config", self.config, "{'model': {'width': 64}}")
        errors += mapping_errors("rename", self.rename, "{'saved': 'wanted'}") or [
            f"rename: {old!r} -> {new!r}: paths must be strings"
            for old, new in self.rename.items()
            if not isinstance(old, str) or not isinstance(new, str)
        ]
        errors += (
            expert_errors(self.experts)
            + dim_errors("upcycle", self.upcycle)
            + dim_errors("expert_dims", self.expert_dims)
        )
        raise_errors(errors)


@shown
@dataclass(frozen=True)
class Restored:
    """The record of a restore.

    Attributes:
        step: the restored step.
        nbytes: bytes of the leaves that were read.
        seconds: time to read them and compare their digests.
        digest_seconds: the part of `seconds` for the digests.
        damaged: newer damaged steps that were skipped.
        kept: leaves of the template that were not saved.
        unread: saved leaves that the template does not have.
        cast: leaves that were cast, as `path: saved dtype -> dtype`.
    """

    step: int
    nbytes: int
    seconds: float
    digest_seconds: float
    damaged: tuple[int, ...] = ()
    kept: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"step {self.step}: {bytes_text(self.nbytes)} read in {self.seconds:.2f} s, "
            f"of which {self.digest_seconds:.2f} s for digests"
        ]
        if self.damaged:
            lines.append(f"damaged and skipped: steps {', '.join(map(str, self.damaged))}")
        for title, names in (("not saved", self.kept), ("saved, not read", self.unread), ("cast", self.cast)):
            if names:
                lines.append(f"{title}: {len(names)} leaves\n{listing(names)}")
        return "\n".join(lines)


@shown
@dataclass(frozen=True)
class Match:
    """The saved leaf for each requested leaf.

    Attributes:
        leaves: the requested leaves, by path.
        given: the leaves of the user's template, before `shardings` is applied.
        saved: the saved leaf for each requested path that has one.
        specs: these leaves after `changes`.
        changes: the changes of experts.
        unread: saved leaves that are not requested.
        structure: the tree structure of the requested state.
    """

    leaves: Mapping[Key, Any]
    given: Mapping[Key, Any]
    saved: Mapping[Key, LeafSpec]
    specs: Mapping[Key, LeafSpec]
    changes: Mapping[Key, Change]
    unread: tuple[LeafSpec, ...]
    structure: Any

    def kept(self, key: Key) -> Any:
        """Return the template's value of a leaf that was not saved, on the requested sharding."""
        given, leaf = self.given[key], self.leaves[key]
        return given if leaf is given else jax.device_put(given, leaf.sharding)

    def read_like(self, key: Key) -> Any:
        """Return a template for the saved leaf."""
        leaf = self.leaves[key]
        return self.changes[key].read_like(leaf, self.saved[key]) if key in self.changes else leaf


def casts(specs: Mapping[Key, LeafSpec], leaves: Mapping[Key, Any]) -> tuple[str, ...]:
    """Return the leaves that are requested in another dtype, as `path: saved dtype -> dtype`."""
    others = {key: spec for key, spec in specs.items() if dtype_text(getattr(leaves[key], "dtype", "")) != spec.dtype}
    requested = {key: leaf_spec(key, leaves[key]) for key in others}
    return tuple(
        f"{requested[key].name}: {spec.dtype} -> {requested[key].dtype}"
        for key, spec in others.items()
        if requested[key].dtype != spec.dtype
    )


def match_paths(
    saved: Mapping[Key, LeafSpec], leaves: Mapping[Key, Any], rename: Mapping[str, str], where: str
) -> dict[Key, Key]:
    """Return the saved path for each requested path that was saved.

    Keys of dicts may contain a '/', so paths are compared level by level. `rename` applies to the joined paths.

    Raises:
        MismatchError: an entry of `rename` matches no saved leaf, or two saved leaves get the same path.
    """
    by_name = {"/".join(key): key for key in leaves}
    by_name |= {"/".join(key): key for key in leaves if not any("/" in level for level in key)}
    origin: dict[Key, Key] = {}
    used, errors = set(), []
    unpaired = [(a, b) for a, b in rename.items() if a.startswith("*/") != b.startswith("*/")]
    errors += [f"{a!r} -> {b!r}: only one of them starts with '*/'" for a, b in unpaired]
    for key, spec in saved.items():
        name, requested = spec.name, key if key in leaves else None
        for old in sorted(rename, key=len, reverse=True):  # the longest match takes precedence
            span = _span_of(old, name)
            if span is not None:
                used.add(old)
                name = name[: span[0]] + rename[old].removeprefix("*/") + name[span[1] :]
                requested = by_name.get(name)
                break
        if requested is None:
            continue
        if requested in origin:
            errors.append(f"{spec.name} and {'/'.join(origin[requested])} both become {name}")
        origin[requested] = key
    errors += [f"{old!r}: matches no saved leaf and no prefix of one" for old in rename if old not in used]
    if errors:
        raise MismatchError(f"{where}: rename does not match:\n{listing(errors)}")
    return origin


def _span_of(old: str, name: str) -> tuple[int, int] | None:
    """Return the span of the levels `old` in a path: at its start, or with `*/` anywhere."""
    start = r"(?:^|(?<=/))" if old.startswith("*/") else "^"
    match = re.search(start + re.escape(old.removeprefix("*/")) + "(?=/|$)", name)
    return None if match is None else match.span()


def check_leaves(
    specs: Mapping[Key, LeafSpec],
    leaves: Mapping[Key, Any],
    given: Mapping[Key, Any],
    unread: Sequence[LeafSpec],
    request: RestoreRequest,
    where: str,
) -> None:
    """Check that saved and requested leaves match as the request demands, and that they can be placed.

    Args:
        specs: the saved leaves, by requested path.
        leaves: the requested leaves.
        given: the leaves of the user's template, before `shardings` is applied.
        unread: saved leaves that are not requested.
        request: the request, with the allowed differences.
        where: the name of the step, for errors.

    Raises:
        MismatchError: naming every leaf that differs, with both shapes and dtypes; or no requested leaf was saved.
        CheckpointError: naming every leaf that cannot be placed.
    """
    requested = {key: leaf_spec(key, leaf) for key, leaf in leaves.items()}
    lines, casts = [], 0
    for key, want in requested.items():
        have = specs.get(key)
        if have is None:
            if not request.partial:
                lines.append(f"{want.name}: not in the checkpoint, wanted {want}")
            elif not _has_value(given[key]):
                lines.append(f"{want.name}: not in the checkpoint, and the template has no value for it")
        elif have.dtype != want.dtype or (have.shape != want.shape and not have.is_text):
            can_cast = have.shape == want.shape and castable(have, want)
            casts += can_cast
            if not (can_cast and request.allow_cast):
                lines.append(f"{want.name}: saved {have}{_as(have, want)}, wanted {want}")
    if not request.partial:
        lines += [f"{spec.name}: saved {spec}, not in the wanted state" for spec in unread]
    if lines:
        hint = f" allow_cast=True casts {casts} of them." if casts and not request.allow_cast else ""
        raise MismatchError(
            f"{where} is a checkpoint of another model: {len(lines)} of {len(requested) + len(unread)} leaves differ:\n"
            f"{listing(lines)}\nUse the model of the checkpoint, or another directory.{hint}"
        )
    lines = placement_errors({key: leaf for key, leaf in leaves.items() if key in specs or leaf is not given[key]})
    if lines:
        raise CheckpointError(f"the state cannot be placed on its shardings:\n{listing(lines)}")
    if request.partial and not specs:
        saved = [f"{spec.name}: saved {spec}" for spec in unread[: LINES_SHOWN // 2]]
        wanted = [f"{want.name}: wanted {want}" for want in [*requested.values()][: LINES_SHOWN // 2]]
        raise MismatchError(
            f"{where} has none of the {len(requested)} wanted leaves among its {len(unread)}:\n"
            f"{listing(saved + wanted)}\n"
            "Nest the wanted state as the saved one is, or map paths with rename={'saved': 'wanted'}."
        )


def _has_value(leaf: Any) -> bool:
    """Return whether a leaf of a template has values, and was not donated."""
    return not isinstance(leaf, jax.ShapeDtypeStruct) and not (isinstance(leaf, jax.Array) and leaf.is_deleted())


def _as(have: LeafSpec, want: LeafSpec) -> str:
    """Return the saved name of a leaf if it differs from the requested one."""
    return f" as {have.name}" if have.key != want.key else ""
