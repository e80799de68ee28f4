"""The plans that experts write by hand: the starting points of the search."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.layout.plan_request import Request, kinds_of_replicas, request


def known_plans(roles: Roles, devices: int, stages: int = 1, replicas: int = 1) -> Iterator[Request]:
    """The known plans for a number of devices, simplest first.

    Args:
        roles: the roles of the program's axes.
        devices: the number of devices.
        stages: the number of stages of the program's pipeline, each of which takes the same number of devices.
        replicas: the number of groups of rows whose sums are added late; if there are several, `dp` shards them
            (`plan_request.kinds_of_replicas`).
    """
    if devices % stages:
        return
    plans = list(_without_state(roles, devices // stages))
    plans += [
        request(plan.sizes, *plan.flags, "state") for plan in plans if len(plan.sizes) > 1 or "fsdp" not in plan.sizes
    ]
    if replicas > 1:
        kinds = kinds_of_replicas(roles)
        plans = [plan for plan in plans if math.prod(plan.sizes.get(kind, 1) for kind in kinds) == replicas]
    for plan in plans:
        sizes = {axis: n for axis, n in plan.sizes.items() if n > 1 or stages == 1}
        yield plan if stages == 1 else request({"pp": stages, **sizes}, *plan.flags)


def _without_state(roles: Roles, devices: int) -> Iterator[Request]:
    """The known plans without the flag `state`."""
    tensor = bool([c for c in roles.parallel if c not in roles.experts])
    for tp in _divisors(devices) if tensor else [1]:
        for ep in _divisors(devices // tp) if roles.experts else [1]:
            for cp in _divisors(devices // tp // ep) if roles.context else [1]:
                rest = devices // tp // ep // cp
                inner = {k: n for k, n in (("cp", cp), ("ep", ep), ("tp", tp)) if n > 1}
                for outer in _batch_kinds(rest) if roles.batch is not None or rest == 1 else []:
                    sizes = {**outer, **inner} or {"dp": 1}
                    for flags in [[], ["seq"]] if tp > 1 and roles.sequence else [[]]:
                        yield request(sizes, *flags)


def _batch_kinds(n: int) -> list[dict[str, int]]:
    """The ways to shard the batch over `n` devices: kind of parallelism -> devices."""
    if n == 1:
        return [{}]
    hybrids = [{"dp": n // k, "fsdp": k} for k in _divisors(n) if 1 < k < n]
    return [{"dp": n}, {"zero1": n}, {"fsdp": n}, *hybrids]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
