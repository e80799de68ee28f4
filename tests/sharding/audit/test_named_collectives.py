"""The names of the collectives of a compiled program: the inputs that they gather, the gradients that they reduce."""

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.sharding.audit.named_collectives import module_of, module_scope, name_collectives
from tests.sharding.example_step import shapes, train_step


def names_of(step, arguments):
    """The names in a step under `fsdp:8`, compiled for the CPU."""
    plan = autoshard.plan(step, *arguments, plan="fsdp:8", donate_argnums=0)
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), arguments, plan.in_shardings()
    )
    return name_collectives(plan, plan.jit().lower(*placed).compile().as_text())


@pytest.fixture(scope="module")
def named():
    return names_of(train_step, shapes())


def test_every_gather_names_its_parameter(named):
    gathered = {path for each in named.collectives if each.kind == "all-gather" for path in each.tensors}
    assert {f"state/params/attention/{name}" for name in ("wq", "wk", "wv", "wo")} <= gathered
    assert {"state/params/embed", "state/params/mlp/up", "state/params/mlp/down"} <= gathered
    assert all(path.startswith("state/params/") for path in gathered)  # no moment is gathered
    (one, *_) = [each for each in named.collectives if each.tensors == ("state/params/mlp/up",)]
    assert one.name.startswith("all-gather over fsdp of state/params/mlp/up, ")
    lines = [each.name for each in named.collectives if each.kind == "all-gather" and "no source line" not in each.name]
    assert len(lines) >= 6 and all(", sharding/example_step.py:" in name for name in lines)  # XLA may drop a line
    assert one.axes == ("fsdp",) and one.is_planned and one.module == "state/params/mlp"
    assert one.step_bytes == 7 / 8 * 32 * 128 * 4 and one.predicted_us > 0 and one.runs == 1


def test_reductions_name_the_parameters_whose_gradients_they_sum(named):
    reduced = [each for each in named.collectives if each.kind in ("all-reduce", "reduce-scatter") and each.tensors]
    assert {path for each in reduced for path in each.tensors} >= {"state/params/mlp/up", "state/params/attention/wo"}
    assert all(" of gradients of state/params/" in each.name for each in reduced)
    loss = [each for each in named.collectives if each.kind == "all-reduce" and each.step_bytes < 100]
    assert all(not each.tensors for each in loss)  # a sum of scalars is no gradient


def test_the_norm_that_scales_all_gradients_is_no_gradient():
    def clipped(params, batch):
        grads = jax.grad(lambda p: jnp.mean((batch @ p["a"] @ p["b"]) ** 2))(params)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda p, g: p - g / norm, params, grads)

    square, rows = (jax.ShapeDtypeStruct((n, 64), "float32") for n in (64, 256))
    found = names_of(clipped, ({"a": square, "b": square}, rows))
    reduced = [each for each in found.collectives if each.kind in ("all-reduce", "reduce-scatter")]
    assert {path for each in reduced for path in each.tensors} == {"params/a", "params/b"}
    assert all(not each.tensors for each in reduced if each.step_bytes < 64)


def test_every_scheduled_instruction_has_a_module(named):
    assert named.module == "jit_train_step" and named.compute_us > 0
    names = {each.instruction for each in named.collectives}
    assert names <= named.modules.keys()
    assert "sharding/example_step.py (loss_of)" in named.modules.values()


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        ("jit(step)/jvp(GPT)/blocks_0/mlp/dot_general", "GPT/blocks_0/mlp"),
        ("jit(step)/transpose(jvp(GPT/blocks_0))/while/body/closed_call/mul", "GPT/blocks_0"),
        ("jit(step)/jvp()/while/body/eval_jaxpr/mlp/dot_general", "mlp"),
        ("jit(step)/transpose(jvp())/checkpoint/rematted_computation/mlp/tanh", "mlp"),
        ("jit(step)/jit(norm)/mul", ""),
        ("jit(step)/(GPT/a/dot:GPT/b/dot)", ""),
        ("", ""),
    ],
)
def test_scopes_leave_out_what_jax_adds(op_name, scope):
    assert module_scope(op_name) == scope


def test_a_module_without_scopes_is_a_function():
    assert module_of("jit(step)/mul", "/a/b/c.py:3 (f.<locals>.g)") == "b/c.py (f.<locals>.g)"
    assert module_of("", "") == "(no source line)" or module_of("", "") == ""
