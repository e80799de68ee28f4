"""The analysis finds axes, roles, names and state, in the order in which they depend on each other."""

import jax
import jax.numpy as jnp

from autoshard.models.workloads import workload
from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.program.tracing import trace
from autoshard.train.program.build import workload_step
from tests.sharding.programs import batch, mlp_state, sgd_step


def test_a_training_step_has_state_roles_and_names():
    traced = trace(sgd_step, (mlp_state(), batch()), {})
    analysis = analyse(traced)
    program, axes, roles = traced.program, analysis.axes, analysis.roles
    assert analysis.state == list(zip(program.inputs[:3], program.outputs[:3], strict=True))
    assert [roles.inputs[v] for v in program.inputs] == ["parameter"] * 3 + ["data"]
    assert axes.of_value[program.inputs[-1]][0] == (roles.batch,)
    assert [axes.names.get(c) for c in (roles.batch, roles.residual) if c is not None] == ["batch", "embed"]


def test_generated_rows_join_the_batch_before_roles_are_found():
    """The bias `b` meets generated rows only. It is a parameter because these rows carry the batch."""

    def step(params, x, key):
        def loss(params):
            generated = jax.random.normal(key, x.shape)
            return jnp.mean((x @ params["w"]) ** 2) - jnp.mean((generated @ params["w"] + params["b"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = {"w": jnp.ones((16, 8)), "b": jnp.ones(8)}
    traced = trace(step, (params, jnp.ones((64, 16)), jax.random.key(0)), {})
    analysis = analyse(traced)
    assert [analysis.roles.inputs[v] for v in traced.program.inputs[:2]] == ["parameter", "parameter"]
    assert [c for c, size in enumerate(analysis.axes.sizes) if size == 64 and analysis.axes.names.get(c)] == [
        analysis.roles.batch
    ]


def test_the_axis_that_is_split_from_the_experts_is_named_too():
    step, *args = workload_step(workload("moe-tiny"))
    traced = trace(step, tuple(args), {})
    analysis = analyse(traced)
    (experts,) = analysis.roles.experts
    (router,) = (
        analysis.axes.of_value[v][-1]
        for v, path in zip(traced.program.inputs, traced.in_paths, strict=True)
        if path.endswith("experts/router") and "opt_state" not in path
    )
    assert analysis.axes.name(experts) == "experts" and router != (experts,)
    assert all(c in analysis.axes.names for c in router)
