"""The plans that experts write by hand, as starting points of the search."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.layout.plan_request import Request, request


def seeds(roles: Roles, devices: int) -> Iterator[Request]:
    """The known plans for this many devices, simplest first."""
    plain = list(_plain_seeds(roles, devices))
    yield from plain
    for asked in plain:
        if len(asked.sizes) > 1 or "fsdp" not in asked.sizes:
            yield request(asked.sizes, *asked.flags, "state")


def _plain_seeds(roles: Roles, devices: int) -> Iterator[Request]:
    tensor = bool([c for c in roles.parallel if c not in roles.experts])
    for tp in _divisors(devices) if tensor else [1]:
        for ep in _divisors(devices // tp) if roles.experts else [1]:
            for cp in _divisors(devices // tp // ep) if roles.context else [1]:
                rest = devices // tp // ep // cp
                inner = {k: n for k, n in (("cp", cp), ("ep", ep), ("tp", tp)) if n > 1}
                for sizes in _batch_kinds(rest) if roles.batch is not None or rest == 1 else []:
                    whole = {**sizes, **inner} or {"dp": 1}
                    for flags in [[], ["seq"]] if tp > 1 and roles.sequence else [[]]:
                        yield request(whole, *flags)


def _batch_kinds(n: int) -> list[dict[str, int]]:
    if n == 1:
        return [{}]
    hybrids = [{"dp": n // k, "fsdp": k} for k in _divisors(n) if 1 < k < n]
    return [{"dp": n}, {"zero1": n}, {"fsdp": n}, *hybrids]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
