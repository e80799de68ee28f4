"""Programs keep their values, dtypes and annotations when a layout is written into them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import xla_metadata
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import _compat, auto_shard
from autoshard.sharding.layout.fixed_shardings import program_shardings
from autoshard.sharding.program.tracing import trace
from autoshard.spmdrules.ir.program import build, walk
from tests.sharding.programs import assert_close, batch

SCAN = ("length", "reverse", "unroll", "_split_transpose")


def jaxpr_before_and_after(fn, *args, **options):
    """The jaxprs of a function without and with a layout."""
    sharded = auto_shard(fn, **options)
    executable = sharded.plan(*args).bound.executable
    run = executable.constrained_program(executable.mesh_over(None))
    return executable.traced.closed, jax.make_jaxpr(run)(*jax.tree.leaves(args))


def loops(closed, name):
    """The equations of one primitive, including nested ones."""
    return [op.eqn for op in build(closed).ops() if op.name == name]


def types(variables):
    return [(v.aval.shape, v.aval.dtype, v.aval.weak_type) for v in variables]


def rows(x, n):
    return jax.vmap(lambda r, n: lax.fori_loop(0, n, lambda i, r: jnp.tanh(r * 1.1), r))(x, n)


def test_a_loop_with_a_trip_count_per_row():
    x, n = batch(size=16), jnp.arange(16)
    assert_close(rows(x, n), auto_shard(rows, plan="dp:8")(x, n))


def test_a_loop_over_products_with_a_trip_count_per_row():
    def run(w, x, n):
        step = lambda r, n: lax.fori_loop(0, n, lambda i, r: jnp.tanh(r @ w), r)  # noqa: E731
        return jax.vmap(step)(x, n)

    w, x, n = batch(1, 64) * 0.1, batch(size=16), jnp.arange(16)
    for plan in ("dp:8", "dp:2 fsdp:4"):
        assert_close(run(w, x, n), auto_shard(run, plan=plan)(w, x, n))


def test_a_loop_uses_constants_of_the_enclosing_program():
    table = np.arange(64, dtype=np.float32)  # too large for a literal, so a constant of the trace

    def run(w, x, limit):
        def again(carry):
            return (carry[0] < limit) & (jnp.sum(table) > 0)

        return lax.while_loop(again, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w + table)), (0, x))[1]

    w, x = batch(1, 64) * 0.1, batch(size=16)
    assert_close(run(w, x, 3), auto_shard(run, plan="dp:4 fsdp:2")(w, x, 3))
    inside = jax.jit(lambda w, x, s: auto_shard(lambda w, x: run(w * s, x, 3), plan="dp:8")(w, x))
    assert_close(run(w * 2, x, 3), inside(w, x, 2.0))  # the constant is a tracer of an outer trace


@pytest.mark.parametrize("mesh_in_force", [False, True])
def test_loops_and_branches_keep_their_types(mesh_of, mesh_in_force):
    def run(w, x, start, flag):
        def again(c):
            return jnp.tanh(c[0] @ w), c[1] * 1.5, c[2] + 1

        x, weak, count = lax.while_loop(lambda c: c[2] < 3, again, (x, 1.0, 0))
        (x, weak), _ = lax.scan(lambda c, _: ((jnp.tanh(c[0] @ w), c[1] * 2.0), None), (x, weak), length=3)
        branch = lax.cond(flag > 0, lambda s: s * 2.0, lambda s: 3.0, start)
        many = lax.switch(flag, [lambda s: s, lambda s: s + 1.0, lambda s: 2.0], start)
        return x, weak, count, branch, many, x.astype(jnp.bfloat16)

    args = batch(1, 64) * 0.1, batch(size=16), 2.0, 1
    if mesh_in_force:
        with jax.set_mesh(mesh_of(dp=8)):
            before, after = jaxpr_before_and_after(run, *args)
            assert_close(run(*args), auto_shard(run)(*args))
    else:
        before, after = jaxpr_before_and_after(run, *args, plan="dp:8")
        assert_close(run(*args), auto_shard(run, plan="dp:8")(*args))
    assert types(_compat.open_jaxpr(before).outvars) == types(_compat.open_jaxpr(after).outvars)
    for name in ("while", "scan", "cond"):
        assert loops(before, name)
        for lowered, original in zip(loops(after, name), loops(before, name), strict=True):
            assert types(lowered.outvars) == types(original.outvars)


def test_a_scan_keeps_its_parameters_and_the_types_of_its_carry():
    def run(w, x):
        def body(carry, row):
            h, weak, half, count = carry
            h = jnp.tanh(row @ w + h)
            return (h, weak * 1.5, half + jnp.bfloat16(1), count + 1), h

        init = (jnp.zeros((16, 64)), 1.0, jnp.bfloat16(0), jnp.int8(0))
        return lax.scan(body, init, x, reverse=True, unroll=2, _split_transpose=True)

    args = batch(1, 64) * 0.1, batch(size=4 * 16).reshape(4, 16, 64)
    before, after = jaxpr_before_and_after(run, *args, plan="dp:8")
    (original,), (lowered,) = loops(before, "scan"), loops(after, "scan")
    assert types(lowered.outvars) == types(original.outvars)
    assert lowered.params.keys() == original.params.keys()
    assert [lowered.params.get(k) for k in SCAN] == [original.params.get(k) for k in SCAN]
    assert lowered.params["reverse"] and lowered.params["unroll"] == 2
    assert_close(run(*args), auto_shard(run, plan="dp:8")(*args))


def test_rematerialisation_is_kept_with_its_policy():
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def loss(w, x):
        layer = jax.checkpoint(lambda x: jnp.tanh(jnp.sin(x @ w) * 2), policy=policy, prevent_cse=False)
        return jnp.sum(layer(layer(x)))

    before, after = jaxpr_before_and_after(jax.grad(loss), batch(1, 64) * 0.1, batch(), plan="dp:8")
    original, lowered = ([op.eqn for op in build(c).ops() if "policy" in op.eqn.params] for c in (before, after))
    assert len(original) == len(lowered) == 2
    for one, other in zip(original, lowered, strict=True):
        assert one.primitive is other.primitive and other.params["policy"] is policy
        assert [one.params[k] for k in ("prevent_cse", "differentiated")] == [
            other.params[k] for k in ("prevent_cse", "differentiated")
        ]


def test_a_stored_parameter_is_cast_on_its_shards_and_gathered_in_the_narrow_dtype():
    def loss(w, x):
        return jnp.mean((x @ w.astype(jnp.bfloat16)) ** 2)

    w, x = jnp.ones((64, 128)), jnp.ones((4096, 64), jnp.bfloat16)
    text = auto_shard(jax.grad(loss), plan="fsdp:8").lower(w, x).as_text()
    constraint = r"sdy.sharding_constraint .*\[\{\}, \{%s\}\]>.* : tensor<64x128x%s>"
    assert re.search(constraint % ('"fsdp"', "bf16"), text)  # as it is stored
    assert re.search(constraint % ("", "bf16"), text)  # as the product takes it
    assert not re.search(constraint % ("", "f32"), text)


# --- calls with a jaxpr ---

W, TABLE = batch(1, 64) * 0.1, np.linspace(0, 1, 64, dtype=np.float32)  # the table is too large for a literal
block = functools.partial(lax.composite, name="my.block")(lambda x, w: jnp.tanh(x @ w))
vectorised = jax.custom_batching.custom_vmap(lambda x, w: jnp.tanh(x @ w))
vectorised.def_vmap(lambda size, batched, x, w: (jnp.tanh(x @ w), True))
saving = jax.custom_vjp(lambda x, w: jnp.tanh(x @ w))
saving.defvjp(
    lambda x, w: (jnp.tanh(x @ w) + TABLE * 0, (jnp.cosh(x @ w) ** -2, x, w)),
    lambda kept, g: ((g * kept[0]) @ kept[2].T, kept[1].T @ (g * kept[0])), optimize_remat=True,
)  # fmt: skip


def linear(w, x):
    return jax.custom_derivatives.linear_call(lambda w, x: (x @ w) * TABLE, lambda w, g: (g * TABLE) @ w.T, w, x).sum()


def solved(w, x):
    return jnp.linalg.solve(w @ w.T + 2 * jnp.eye(64), x.T).sum()


def conjugate(w, x):
    return jax.scipy.sparse.linalg.cg(lambda v: jnp.cos(w) @ v * 0.1 + 3 * v, x.sum(0), maxiter=4)[0].sum()


CALLED_WITH_METADATA = getattr(xla_metadata, "xla_metadata_call2", None)  # not in the oldest supported JAX


def noted(w, x):
    assert CALLED_WITH_METADATA is not None
    return CALLED_WITH_METADATA({"kept": "so"})(lambda x, w: jnp.tanh(x @ w))(x, w).sum()


CALLS = [
    ("composite", lambda w, x: (block(x, w) @ w).sum()),
    ("custom_vmap_call", lambda w, x: (vectorised(x, w) @ w).sum()),
    ("linear_call", linear),
    ("linear_call", jax.grad(linear, argnums=1)),
    ("custom_linear_solve", solved),
    ("custom_linear_solve", jax.grad(solved)),
    ("custom_linear_solve", conjugate),
    ("remat_opt", jax.value_and_grad(lambda w, x: jnp.sin(saving(x, w)).sum())),
    *([("xla_metadata_call", noted)] if CALLED_WITH_METADATA else []),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "fn"), CALLS)
def test_the_body_of_a_call_is_planned_and_the_call_is_kept(name, fn):
    x = batch(size=32)
    assert_close(jax.jit(fn)(W, x), auto_shard(fn, plan="dp:8")(W, x))
    before, after = jaxpr_before_and_after(fn, W, x, plan="dp:8")
    constraints = {op.name for call in calls(after, name) for op in walk(call.blocks[0])} & {"sharding_constraint"}
    assert len(calls(before, name)) >= len(calls(after, name)) > 0 and constraints


def calls(closed, name):
    """The operators of one primitive, including nested ones."""
    return [op for op in build(closed).ops() if op.name == name]


@pytest.mark.whole
def test_a_planned_solve_can_be_differentiated():
    x = batch(size=32)
    planned = auto_shard(solved, plan="dp:8")
    assert_close(jax.grad(solved)(W, x), jax.grad(planned)(W, x))


def test_a_host_callback_runs_once_with_the_whole_array():
    received = []

    def run(w, x):
        jax.debug.callback(lambda h: received.append(np.asarray(h)), x @ w)
        return (x @ w).sum()

    x = batch(size=32)
    planned = auto_shard(run, plan="dp:8")
    assert_close(run(W, x), planned(W, x))
    jax.effects_barrier()
    assert [h.shape for h in received] == [(32, 64)] * 2 and not planned.plan(W, x).unknown
    assert_close(*received)


def test_the_shard_map_of_a_user_runs_in_a_planned_program(mesh_of):
    mesh = mesh_of(i=4, j=2)
    specs = {"in_specs": (P("i", "j"), P("j")), "out_specs": P("i")}
    mapped = jax.shard_map(lambda x, w: lax.psum(jnp.tanh(x @ w), "j"), mesh=mesh, **specs)
    run = lambda w, x: (mapped(x, w) @ w).sum()  # noqa: E731
    x = batch(size=32)
    for planned in (auto_shard(run, mesh=mesh), auto_shard(run, plan="dp:8")):
        assert_close(jax.jit(run)(W, x), planned(W, x))


# --- annotations in the user's program ---


def test_shardings_of_a_nested_jit_are_kept(mesh_of):
    mesh = mesh_of(i=8)
    plain = lambda x, w: jnp.tanh(x @ w) * 2  # noqa: E731
    constraint = re.compile(r"sdy.sharding_constraint.*\[\{\}, \{\"i\"\}\]")
    spec = NamedSharding(mesh, P(None, "i"))
    for inner in (jax.jit(lambda h: h * 2, in_shardings=spec), jax.jit(lambda h: h * 2, out_shardings=spec)):
        sharded = auto_shard(lambda x, w, inner=inner: inner(jnp.tanh(x @ w)), mesh=mesh)
        x, w = batch(size=16), batch(1, 64) * 0.1
        assert_close(plain(x, w), sharded(x, w))
        assert constraint.search(sharded.lower(x, w).as_text())
    sharded = auto_shard(lambda x, w: jax.jit(lambda h: h * 2)(jnp.tanh(x @ w)), mesh=mesh, plan={"i": ["batch"]})
    assert not constraint.search(sharded.lower(x, w).as_text())


def test_own_specs_returns_every_sharding_in_a_program(mesh_of):
    mesh = mesh_of(i=4, j=2)
    rows, columns, both = (NamedSharding(mesh, s) for s in (P("i"), P(None, "j"), P("i", "j")))

    def run(x):
        x = lax.with_sharding_constraint(x, rows)
        x = jax.jit(lambda a, b: (a + b, a), in_shardings=(columns, None), out_shardings=(None, both))(x, x * 2)
        return jax.jit(lambda a, b: a - b)(*x)

    specs = [s.spec for op in trace(run, (batch(),), {}).program.ops() for s in program_shardings(op)]
    assert specs == [P("i"), P(None, "j"), P("i", "j")]


# --- gathers ---


def loop_of_layers(params, x):
    def layer(x, p):
        return jnp.tanh(x * p["scale"]) @ p["w"], None

    return jnp.mean(lax.scan(layer, x, params)[0] ** 2)


@pytest.mark.whole
def test_small_stacks_are_gathered_once_before_the_loop():
    params = {"scale": jnp.ones((4, 256)), "w": batch(0, 4 * 256, 256).reshape(4, 256, 256) / 16}
    x = batch(1, 4096, 256)

    def step(params, x):
        gradients = jax.grad(loop_of_layers)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    sharded = auto_shard(step, plan="fsdp:8")
    text = sharded.lower(params, x).compile().as_text()
    bodies, _, entry = text.partition("\nENTRY")
    gathers = re.compile(r"= (\S+?)\{\S* all-gather\(")
    assert "f32[4,256]" in gathers.findall(entry)
    assert not [shape for shape in gathers.findall(bodies) if shape.endswith("[256]") or shape.endswith("[1,256]")]
    assert "f32[1,256,256]" in gathers.findall(bodies)  # a weight is gathered inside the loop
    plan = sharded.plan(params, x)
    assert {(kind, line) for kind, _, _, line in plan.traffic} >= {("all-gather", "parameters, before a loop")}
    assert_close(step(params, x), sharded(params, x))


def test_a_gather_from_a_table_that_is_sharded_along_both_dimensions():
    def loss(params, x):
        z = x @ params["into"]
        distance = jnp.sum((z[:, :, None] - params["codes"]) ** 2, -1)
        return jnp.mean((params["codes"][distance.argmin(-1)] @ params["out"] - x) ** 2)

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    params = {"into": batch(0, 24, 16), "codes": batch(1, 32, 16), "out": batch(2, 16, 24)}
    x = batch(3, 48, 24).reshape(8, 6, 24)
    for plan in ("dp:2 fsdp:2 tp:2", "fsdp:4 tp:2"):
        assert_close(step(params, x), auto_shard(step, plan=plan)(params, x))


@pytest.mark.filterwarnings("ignore:.*attached devices are idle")
def test_the_dimension_of_a_fourier_transform_is_gathered_first():
    """XLA does not gather it by itself, and its program fails at run time."""
    fn = lambda x: jnp.fft.fft(x * 2.0).real  # noqa: E731
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    actual = auto_shard(fn, plan={"x": ["seq"]}, mesh={"x": 2})(x)
    np.testing.assert_allclose(actual, fn(x), rtol=1e-5, atol=1e-4)


def test_an_operator_that_communicates_takes_a_number_of_python():
    """JAX 0.12 keeps the numbers of Python in a program as they are, without a dtype."""
    numbers = lax.ScatterDimensionNumbers((), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))

    def fn(mask, x, w):
        return jnp.where(lax.scatter(mask, jnp.array([3]), True, numbers), x @ w, 0.0)

    args = jnp.zeros(32, bool), batch(size=32, width=16), batch(size=16, width=32)
    assert_close(fn(*args), auto_shard(fn, plan="fsdp:8")(*args))
