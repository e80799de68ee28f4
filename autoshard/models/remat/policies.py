"""The words of a config's `remat`, and their policies of `jax.checkpoint`.

    remat  = policy {"," policy}                          the policies alternate over the layers
    policy = a key of `REMAT_POLICIES` | group {" " group}
    group  = ("host:" | "keep:") name {"+" name}          names of `named_values.NAMED_VALUES`

Values after `host:` are moved to the host's memory in the forward pass, and back for the backward pass. Values
after `keep:` stay in the memory of the device. All other values are recomputed from the layer's input.

    host:residual                           the layer's input waits on the host, all else is recomputed
    host:residual+qkv keep:out_proj         as experts choose for large models
    host:residual+qkv+context,full          every second layer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from autoshard.models.remat.named_values import NAMED_VALUES

HOST, KEEP = "host", "keep"

REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""Words of `remat` -> their policies of `jax.checkpoint`. `none` does not use `jax.checkpoint`."""


def remat_policies(remat: str) -> tuple[str, ...]:
    """Split `remat` into the policies that alternate over the layers.

    >>> remat_policies("full,none")
    ('full', 'none')
    """
    return tuple(part.strip() for part in remat.split(","))


def named_groups(policy: str) -> Mapping[str, tuple[str, ...]] | None:
    """Return the names that a policy moves to the host and those that it keeps; None if it is a single word.

    >>> named_groups("host:residual+qkv keep:out_proj")
    {'host': ('residual', 'qkv'), 'keep': ('out_proj',)}
    """
    if ":" not in policy:
        return None
    found: dict[str, tuple[str, ...]] = {HOST: (), KEEP: ()}
    for group in policy.split():
        place, _, names = group.partition(":")
        found[place] = (*found.get(place, ()), *names.split("+"))
    return found


def recomputes(remat: str, name: str) -> bool:
    """Return whether every layer recomputes a named value in its backward pass.

    Args:
        remat: the policies.
        name: the name of a product with batch dimensions, such as those of experts.

    >>> [recomputes(remat, "mlp_out") for remat in ("none", "dots", "keep:mlp_out", "full,keep:mlp_out")]
    [False, True, False, False]
    """
    groups = {policy: named_groups(policy) for policy in remat_policies(remat)}
    keep = ("none", "everything_saveable", "dots_saveable")
    return all(
        policy not in keep if found is None else all(name not in names for names in found.values())
        for policy, found in groups.items()
    )


def host_names(remat: str) -> tuple[str, ...]:
    """Return the names of the values that any layer moves to the host, in the order of a layer.

    >>> host_names("full,host:qkv+residual keep:mlp_in")
    ('residual', 'qkv')
    """
    found = {name for policy in remat_policies(remat) for name in (named_groups(policy) or {HOST: ()})[HOST]}
    return tuple(name for name in NAMED_VALUES if name in found)


def kept_on_device(remat: str) -> str:
    """Return `remat` with the values that wait on the host kept on the device instead.

    >>> kept_on_device("full,host:residual+qkv keep:mlp_in")
    'full,keep:residual+qkv+mlp_in'
    """
    return ",".join(
        policy if groups is None else f"{KEEP}:{'+'.join((*groups[HOST], *groups[KEEP]))}"
        for policy in remat_policies(remat)
        for groups in [named_groups(policy)]
    )


def checkpoint_policy(policy: str) -> Callable[..., Any] | None:
    """Return the policy of `jax.checkpoint` of a valid policy; None for `none`."""
    groups = named_groups(policy)
    if groups is None:
        return REMAT_POLICIES[policy]
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=groups[KEEP],
        names_which_can_be_offloaded=groups[HOST],
        offload_src="device",
        offload_dst="pinned_host",
    )


def remat_problems(remat: str, layers: int, *, scan: bool, has_named_values: bool = True) -> list[str]:
    """Return what is wrong with `remat` for this number of layers, or an empty list.

    Args:
        remat: the text.
        layers: number of layers, or of the groups of layers that are stacked.
        scan: whether the layers are stacked.
        has_named_values: whether the model's layers have the values of `NAMED_VALUES`.
    """
    policies = remat_policies(remat)
    words, texts = [p for p in policies if ":" not in p], [p for p in policies if ":" in p]
    if any(word not in REMAT_POLICIES for word in words):
        known = ", ".join(REMAT_POLICIES)
        some = ", named values such as host:residual+qkv keep:out_proj" if has_named_values else ""
        return [
            f"remat is {remat!r}; choose one of {known}{some}, or several with commas, to alternate over the layers"
        ]
    if texts and not has_named_values:
        return [
            f"remat is {remat!r}; this model's layers have no named values: choose one of {', '.join(REMAT_POLICIES)}"
        ]
    problems = [f"remat is {remat!r}; {problem}" for text in texts for problem in _group_problems(text)]
    if not problems and scan and layers % len(policies):
        problems.append(
            f"remat is {remat!r}; {layers} scanned layers do not divide into groups of {len(policies)}: give a number "
            f"of policies that divides {layers}, or set scan_layers=False"
        )
    return problems


def _group_problems(policy: str) -> list[str]:
    """Return what is wrong with a policy of named values."""
    wrong = [group for group in policy.split() if group.partition(":")[0] not in (HOST, KEEP) or ":" not in group]
    if wrong:
        return [
            f"{wrong[0]!r} is not host:NAME+NAME or keep:NAME+NAME; separate names with '+', and the two groups with "
            "a space"
        ]
    names = [name for some in (named_groups(policy) or {}).values() for name in some]
    unknown = [name for name in names if name not in NAMED_VALUES]
    if unknown:
        return [f"{unknown[0]!r} is not a named value; the named values of a layer are {', '.join(NAMED_VALUES)}"]
    twice = [name for name in NAMED_VALUES if names.count(name) > 1]
    return [f"{twice[0]!r} occurs twice; name it once, after host: or after keep:"] if twice else []
