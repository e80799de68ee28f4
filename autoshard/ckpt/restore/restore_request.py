"""What is wanted of a checkpoint, which saved leaf is for which, and how it went."""

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
from autoshard.ckpt.state.target_shardings import unfit
from autoshard.ckpt.store.argument_checks import no_dims, no_experts, no_mapping, refuse
from autoshard.errors import CheckpointError, MismatchError


@shown
@dataclass(frozen=True)
class RestoreRequest:
    """What is to be read, and what of a checkpoint that is not quite that will do.

    Attributes:
        template: the state as it is wanted; None for all that was saved, by paths.
        shardings: on which it is wanted, where the template's own will not do.
        config: compared with the saved one.
        allow_cast: whether leaves of another dtype are cast, integers to integers and floats to floats.
        partial: whether leaves that were not saved stay as the template has them, and saved ones that the
            template lacks are left out.
        rename: paths, or the first levels of paths, that the template calls otherwise: saved -> wanted; both
            with `*/` before them for such levels in the middle of a path.
        experts: which experts are wanted, by their numbers, in this order; None for all.
        upcycle: patterns of wanted paths of experts that are copies of a dense layer -> dimension of experts.
        expert_dims: patterns of saved paths -> dimension of experts, where the checkpoint does not say it.
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
        """Refuse what is of another type.

        Raises:
            CheckpointError: naming each argument that is wrong.
        """
        wrong = [] if self.config is None else no_mapping("config", self.config, "{'model': {'width': 64}}")
        wrong += no_mapping("rename", self.rename, "{'saved': 'wanted'}") or [
            f"rename: {old!r} -> {new!r}: paths are texts"
            for old, new in self.rename.items()
            if not isinstance(old, str) or not isinstance(new, str)
        ]
        wrong += no_experts(self.experts) + no_dims("upcycle", self.upcycle) + no_dims("expert_dims", self.expert_dims)
        refuse(wrong)


@shown
@dataclass(frozen=True)
class Restored:
    """How a restore went.

    Attributes:
        step: the one that was restored.
        damaged: newer steps that were damaged, and passed over.
        nbytes: bytes of the leaves that were read.
        seconds: of reading them and comparing their digests.
        digest_seconds: of these for the digests.
        kept: leaves of the template that were not saved.
        unread: saved leaves that the template lacks.
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
            lines.append(f"damaged, and passed over: steps {', '.join(map(str, self.damaged))}")
        for told, names in (("not saved", self.kept), ("saved, not read", self.unread), ("cast", self.cast)):
            if names:
                lines.append(f"{told}: {len(names)} leaves\n{listing(names)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Match:
    """Which saved leaf is for which wanted one.

    Attributes:
        leaves: what is wanted, by path.
        given: the same as the caller has it, on its own shardings.
        saved: the saved leaf for each wanted path that has one.
        specs: what these are once they are changed.
        changes: how they are changed, where they are.
        unread: saved leaves that nothing is wanted of.
        structure: of the wanted state.
    """

    leaves: Mapping[Key, Any]
    given: Mapping[Key, Any]
    saved: Mapping[Key, LeafSpec]
    specs: Mapping[Key, LeafSpec]
    changes: Mapping[Key, Change]
    unread: tuple[LeafSpec, ...]
    structure: Any

    def kept(self, key: Key) -> Any:
        """The caller's value of a leaf that was not saved, where it is wanted."""
        given, leaf = self.given[key], self.leaves[key]
        return given if leaf is given else jax.device_put(given, leaf.sharding)

    def read_like(self, key: Key) -> Any:
        """A template for the saved leaf."""
        leaf = self.leaves[key]
        return self.changes[key].read_like(leaf, self.saved[key]) if key in self.changes else leaf


def casts(specs: Mapping[Key, LeafSpec], leaves: Mapping[Key, Any]) -> tuple[str, ...]:
    """The leaves that are wanted in another dtype, as `path: saved dtype -> dtype`."""
    others = {key: spec for key, spec in specs.items() if dtype_text(getattr(leaves[key], "dtype", "")) != spec.dtype}
    asked = {key: leaf_spec(key, leaves[key]) for key in others}
    return tuple(
        f"{asked[key].name}: {spec.dtype} -> {asked[key].dtype}"
        for key, spec in others.items()
        if asked[key].dtype != spec.dtype
    )


def renamed(
    saved: Mapping[Key, LeafSpec], leaves: Mapping[Key, Any], rename: Mapping[str, str], where: str
) -> dict[Key, Key]:
    """For each wanted path that was saved, the saved one.

    Names of dicts may hold a '/', so a path is compared level by level; what is renamed is so by its text.

    Raises:
        MismatchError: a name matches no saved leaf, or two saved leaves get one path.
    """
    by_name = {"/".join(key): key for key in leaves}
    by_name |= {"/".join(key): key for key in leaves if not any("/" in level for level in key)}
    found: dict[Key, Key] = {}
    used, wrong = set(), []
    lone = [(a, b) for a, b in rename.items() if a.startswith("*/") != b.startswith("*/")]
    wrong += [f"{a!r} -> {b!r}: '*/' stands in one alone" for a, b in lone]
    for key, spec in saved.items():
        name, wanted = spec.name, key if key in leaves else None
        for old in sorted(rename, key=len, reverse=True):  # the longest that fits says it
            found_at = _place(old, name)
            if found_at is not None:
                used.add(old)
                name = name[: found_at[0]] + rename[old].removeprefix("*/") + name[found_at[1] :]
                wanted = by_name.get(name)
                break
        if wanted is None:
            continue
        if wanted in found:
            wrong.append(f"{spec.name} and {'/'.join(found[wanted])} both become {name}")
        found[wanted] = key
    wrong += [f"{old!r}: no saved leaf is called that or lies below it" for old in rename if old not in used]
    if wrong:
        raise MismatchError(f"{where}: rename does not fit:\n{listing(wrong)}")
    return found


def _place(old: str, name: str) -> tuple[int, int] | None:
    """Where the levels that a renaming names stand in a path: at its start, or with `*/` anywhere."""
    start = r"(?:^|(?<=/))" if old.startswith("*/") else "^"
    found = re.search(start + re.escape(old.removeprefix("*/")) + "(?=/|$)", name)
    return None if found is None else found.span()


def check_leaves(
    specs: Mapping[Key, LeafSpec],
    leaves: Mapping[Key, Any],
    given: Mapping[Key, Any],
    unread: Sequence[LeafSpec],
    wanted: RestoreRequest,
    where: str,
) -> None:
    """Refuses saved leaves that are not what is wanted, and wanted ones that cannot be placed, all at once.

    Args:
        specs: what is saved, by wanted path.
        leaves: what is wanted.
        given: the same as the caller has it, on its own shardings.
        unread: saved leaves that nothing is wanted of.
        wanted: what will do.
        where: names the step.

    Raises:
        MismatchError: naming every leaf that differs, with both shapes and dtypes; or no wanted leaf was saved.
        CheckpointError: naming every leaf that cannot be placed.
    """
    asked = {key: leaf_spec(key, leaf) for key, leaf in leaves.items()}
    lines, casts = [], 0
    for key, want in asked.items():
        have = specs.get(key)
        if have is None:
            if not wanted.partial:
                lines.append(f"{want.name}: not in the checkpoint, wanted {want}")
            elif not _has_value(given[key]):
                lines.append(f"{want.name}: not in the checkpoint, and the template has no value to keep")
        elif have.dtype != want.dtype or (have.shape != want.shape and not have.is_text):
            fits = have.shape == want.shape and castable(have, want)
            casts += fits
            if not (fits and wanted.allow_cast):
                lines.append(f"{want.name}: saved {have}{_as(have, want)}, wanted {want}")
    if not wanted.partial:
        lines += [f"{spec.name}: saved {spec}, not in the wanted state" for spec in unread]
    if lines:
        hint = f" allow_cast=True casts {casts} of them." if casts and not wanted.allow_cast else ""
        raise MismatchError(
            f"{where} is a checkpoint of another model: {len(lines)} of {len(asked) + len(unread)} leaves differ:\n"
            f"{listing(lines)}\nUse the model that it was saved with, or another directory.{hint}"
        )
    lines = unfit({key: leaf for key, leaf in leaves.items() if key in specs or leaf is not given[key]})
    if lines:
        raise CheckpointError(f"the state cannot be placed as its template says:\n{listing(lines)}")
    if wanted.partial and not specs:
        saved = [f"{spec.name}: saved {spec}" for spec in unread[: LINES_SHOWN // 2]]
        asks = [f"{want.name}: wanted {want}" for want in [*asked.values()][: LINES_SHOWN // 2]]
        raise MismatchError(
            f"{where} has none of the {len(asked)} wanted leaves among its {len(unread)}:\n{listing(saved + asks)}\n"
            "Nest the wanted state as the saved one is, or say other paths by rename={'saved': 'wanted'}."
        )


def _has_value(leaf: Any) -> bool:
    """Whether a leaf of a template is more than a description, and was not donated."""
    return not isinstance(leaf, jax.ShapeDtypeStruct) and not (isinstance(leaf, jax.Array) and leaf.is_deleted())


def _as(have: LeafSpec, want: LeafSpec) -> str:
    """Under which name it was saved, where that is another."""
    return f" as {have.name}" if have.key != want.key else ""
