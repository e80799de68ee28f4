"""Plans whose pages the tests look at."""

from dataclasses import replace
from functools import cache

from jax.sharding import PartitionSpec as P

import autoshard
from autoshard._units import variant_text
from autoshard.sharding.api.plan import Plan
from autoshard.sharding.audit import Audit
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.report.summary import local_bytes, mesh_sizes
from tests.sharding.example_step import shapes, train_step

WIDE, NARROW = 1280, 390


EVIL = "<script>window.evil = 1</script>&\"'"


def step(state, batch, *, twice=False):
    """Run the example's step once or twice."""
    state, metrics = train_step(state, batch)
    return train_step(state, batch) if twice else (state, metrics)


@cache
def searched() -> Plan:
    """Search the plans of two variants on a torus, some of which do not fit."""
    plan = autoshard.plan(step, *shapes(), target="v5e:2x4", donate_argnums=0, variants={"twice": [False, True]})
    peaks = sorted(t.peak_bytes for each in plan.history for t in each.tried)
    limit = max(peaks[len(peaks) * 2 // 3], plan.estimate.peak_memory_bytes)
    return plan.where(limit_bytes=limit, usable_bytes=limit)


@cache
def requested() -> Plan:
    """Request a plan with two mesh axes that shard parameters, activations and storage."""
    plan = autoshard.plan(train_step, *shapes(), plan="fsdp:2 tp:4 seq", target="v5p:2x2x2", donate_argnums=0)
    # The assignment is not in the order of the devices.
    return plan.where(placing={"fsdp": (("x", 2, 1),), "tp": (("y", 2, 1), ("z", 2, 1))})


@cache
def large() -> Plan:
    """Make a plan of 80 unrolled layers, with names that are HTML."""
    plan = requested()
    layers = [
        replace(leaf, path=f"{tree}/layers/{n}/{leaf.path}", role=role)
        for tree, role in (("params", "parameter"), ("mu", "optimizer"), ("nu", "optimizer"))
        for n in range(80)
        for leaf in plan.inputs
        if leaf.role == "parameter"
    ]
    odd = [
        Leaf(f"params/odd/{n}", (2 * n + 2, 8), "float32", P("fsdp"), ("embed", f"odd/{n}:1"), "parameter")
        for n in range(300)
    ]
    evil = Leaf(f"params/{EVIL}", (8,), "float32", P(), (f"{EVIL}:0",), "parameter")
    wordy = replace(layers[0], path=f"params/{'Transformer_' * 6}0/{'MultiHeadAttention_' * 4}", shape=(32, 8, 8))
    line = f"/somewhere/models/{'experts_' * 5}.py:231:2 (Experts._by_sorting.<locals>.<lambda>)"
    activations = [replace(one, line=line, path="ragged_dot_general") for one in plan.activations]
    return plan.where(inputs=(*layers, *odd, wordy, evil), outputs=tuple(layers), activations=tuple(activations),
                      traffic=tuple((*row[:3], line) for row in plan.traffic),
                      function=EVIL, chosen=EVIL, notes=(EVIL,))  # fmt: skip


@cache
def compiled() -> Plan:
    """Add what a compiler might report to a searched plan: slower, smaller, with a peak below its temporaries."""
    plan = searched()
    here = plan.estimate
    audit = Audit(
        "ok", target=plan.target, mesh=mesh_sizes(plan), strategy=f"{plan.chosen} ({variant_text(plan.variant)})",
        memory={"argument": 2**20, "output": 2**20, "alias": 2**20, "temp": 12 * 2**20, "peak": 11 * 2**20},
        peak_bytes=11 * 2**20, predicted_peak_bytes=here.peak_memory_bytes, compute_us=900.0, compute_us_cycles=900.0,
        compute_us_roofline=300.0, comm_us=200.0, exposed_us=100.0, step_time_us=1000.0,
        predicted_step_time_us=here.step_time_us, wire_bytes=3 * 2**20,
    )  # fmt: skip
    other = replace(audit, strategy="dp:8", predicted_step_time_us=1.0, step_time_us=2000.0, peak_bytes=5 * 2**20)
    return plan.where(audits=(other, audit))


@cache
def offloaded() -> Plan:
    """Keep the optimizer state of a requested plan in host memory."""
    plan = requested()
    inputs = tuple(replace(x, memory_kind="pinned_host") if x.role == "optimizer" else x for x in plan.inputs)
    on_host = sum(local_bytes(x, mesh_sizes(plan)) for x in inputs if x.memory_kind == "pinned_host")
    return plan.where(inputs=inputs, estimate=replace(plan.estimate, host_memory_bytes=on_host * 1.5))


PLANS = {"searched": searched, "requested": requested, "large": large, "compiled": compiled, "offloaded": offloaded}
