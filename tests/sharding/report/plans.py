"""Plans for the tests of reports: real ones, read ones, and half-built ones."""

from functools import cache

import autoshard
from autoshard.sharding.api.plan import Plan
from autoshard.sharding.machines.device_mesh import abstract_mesh
from autoshard.sharding.plan.sharding_plan import Estimate
from tests.sharding.example_step import shapes, train_step

REQUESTS = (None, "dp:8", "zero1:8", "fsdp:8", "tp:8", "fsdp:2 tp:4 seq", "dp:2 fsdp:2 tp:2")


@cache
def planned(words="fsdp:2 tp:4 seq", **options):
    return autoshard.plan(train_step, *shapes(), plan=words, target="cpu:8", donate_argnums=0, **options)


def unbound(words="fsdp:2 tp:4 seq"):
    return Plan.from_json(planned(words).to_json())


def half_built(**fields):
    start = dict(mesh=abstract_mesh({}), axis_rules={}, storage={}, inputs=(), outputs=(),
                 estimate=Estimate(0, 0, 0, 0, 0), target="")  # fmt: skip
    return Plan(**(start | fields))  # type: ignore[arg-type]
