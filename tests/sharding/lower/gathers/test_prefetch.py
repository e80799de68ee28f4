"""Gathering parameters one layer early changes no value, and the gathers do not wait for the layer before."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard import Plan, _compat, auto_shard, plan
from autoshard.sharding.layout.unrolled_layers import repeats
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.sharding.lower.gathers.test_gather_order import scanned, step_of, unrolled
from tests.sharding.programs import assert_close

LAYERS, WIDTH, HIDDEN = 3, 96, 512  # slices so large that they are not gathered before the loop
ROWS = 2048  # so many that it is cheaper to gather a parameter than the rows


def parameters(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 2)
    shapes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    return {n: jax.random.normal(k, s, dtype) * s[1] ** -0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def layer(p, h):
    return h + jnp.tanh(h @ p["up"].astype(h.dtype)) @ p["down"].astype(h.dtype)


def sliced(layer):
    """The layers of a stack, written out."""
    return lambda stack, h: unrolled(layer)([jax.tree.map(lambda x, n=n: x[n], stack) for n in range(LAYERS)], h)


def backwards(layer):
    return lambda stack, h: jax.lax.scan(lambda h, p: (layer(p, h), None), h, stack, reverse=True)[0]


PROGRAMS = {
    "scanned": scanned(layer),
    "scanned, full remat": scanned(jax.checkpoint(layer)),
    "backwards": backwards(jax.checkpoint(layer)),
    "written out": sliced(layer),
    "written out, full remat": sliced(jax.checkpoint(layer)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("words", ["fsdp:8", "fsdp:4 tp:2"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_loss_and_gradients_are_those_of_one_device(name, words):
    params, x = parameters(), jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    gradient = jax.value_and_grad(lambda p, x: jnp.mean(PROGRAMS[name](p, x) ** 2))
    assert_close(jax.jit(gradient)(params, x), auto_shard(gradient, plan=words, gather="prefetch")(params, x))


@pytest.mark.slow
def test_float64():
    with jax.enable_x64(True):
        params, x = parameters(jnp.float64), jax.random.normal(jax.random.key(1), (ROWS, WIDTH), jnp.float64)
        gradient = jax.value_and_grad(lambda p, x: jnp.mean(PROGRAMS["scanned, full remat"](p, x) ** 2))
        actual = auto_shard(gradient, plan="fsdp:4 tp:2", gather="prefetch")(params, x)
        assert_close(jax.jit(gradient)(params, x), actual, 1e-13)


def lowered(forward, gather, dtype=jnp.float32, rows_dtype=jnp.float32):
    params, x = parameters(dtype), jnp.ones((ROWS, WIDTH), rows_dtype)
    return plan(step_of(forward), params, x, plan="fsdp:8", gather=gather).jit().lower(params, x)


def carried(text):
    """The whole parameters of one layer among the carries of the loops of a lowered program."""
    loops = re.findall(r"stablehlo.while\(.*?\) : (.*)", text)
    return sum(loop.count(f"tensor<{n}x{m}x") for loop in loops for n, m in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))


@pytest.mark.parametrize("name", ["scanned", "scanned, full remat"])
def test_loops_carry_the_next_iterations_parameters(name):
    assert carried(lowered(PROGRAMS[name], "auto").as_text()) == 0
    assert carried(lowered(PROGRAMS[name], "prefetch").as_text()) == 4  # two parameters, forward and backward


def test_narrow_parameters_are_carried_as_they_are_gathered():
    for stored, used in ((jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)):
        text = lowered(PROGRAMS["scanned"], "prefetch", stored, used).as_text()
        assert f"tensor<{WIDTH}x{HIDDEN}xbf16>" in re.findall(r"stablehlo.while\(.*?\) : (.*)", text)[0]


@pytest.mark.parametrize("name", ["scanned", "scanned, full remat"])
def test_the_next_iterations_gathers_depend_on_nothing_that_an_iteration_computes(name):
    params, x = parameters(), jnp.ones((ROWS, WIDTH))
    made = bound_or_error(plan(step_of(PROGRAMS[name]), params, x, plan="fsdp:8", gather="prefetch").bound)
    program = jax.make_jaxpr(made.executable.constrained_program(made.executable.mesh_over(None)))
    scans = [e for e in program(*jax.tree.leaves((params, x))).eqns if e.primitive.name == "scan"]
    assert len(scans) == 2
    for scan in scans:
        body, (consts, carries) = _compat.open_jaxpr(scan.params["jaxpr"]), _compat.scan_arity(scan.params)
        carry = body.invars[consts : consts + carries]
        next_ones = [v for v in body.outvars[:carries] if v.aval.shape in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))]
        needed, made_by = {*next_ones}, {v: e for e in body.eqns for v in e.outvars}
        left = [*next_ones]
        while left:
            before = [v for v in made_by[left.pop()].invars if not isinstance(v, _compat.Literal)]
            left += [v for v in before if v not in needed and v in made_by]
            needed.update(before)
        assert len(next_ones) == 2 and [v.aval.shape for v in carry if v in needed] == [()]  # the number of the layer


@pytest.mark.parametrize("gather", ["auto", "prefetch"])
def test_the_carried_rows_have_their_planned_sharding(gather):
    params, x = parameters(), jnp.ones((ROWS, WIDTH))
    made = bound_or_error(plan(step_of(PROGRAMS["scanned"]), params, x, plan="fsdp:8", gather=gather).bound)
    program = jax.make_jaxpr(made.executable.constrained_program(made.executable.mesh_over(None)))
    scans = [e for e in program(*jax.tree.leaves((params, x))).eqns if e.primitive.name == "scan"]
    assert len(scans) == 2  # forward and backward
    for scan in scans:
        body, (consts, carries) = _compat.open_jaxpr(scan.params["jaxpr"]), _compat.scan_arity(scan.params)
        (rows,) = [v for v in body.invars[consts : consts + carries] if v.aval.shape == (ROWS, WIDTH)]
        (user,) = [e for e in body.eqns if rows in e.invars]
        assert user.primitive.name == "sharding_constraint" and user.params["sharding"].spec == P("fsdp")


def test_gathers_of_written_out_layers_wait_for_the_input_of_the_layer_before():
    text = lowered(PROGRAMS["written out, full remat"], "prefetch").as_text()
    # Two parameters, three layers, forward and backward; those of the first two stages wait for nothing.
    assert len(re.findall("stablehlo.xor", text)) == 2 * (2 * LAYERS - 2)


@pytest.mark.parametrize(
    ("keys", "groups"),
    [
        ("", []),
        ("abc", [(0, 3, 1)]),
        ("eqqqofqqqofhfoqqqfoqqq", [(0, 1, 1), (1, 5, 2), (11, 1, 1), (12, 5, 2)]),
        ("aaaa", [(0, 1, 4)]),
    ],
)
def test_repeated_groups(keys, groups):
    assert repeats(keys) == groups


def test_a_plan_that_was_read_gathers_the_same_early():
    params, x = parameters(), jnp.ones((ROWS, WIDTH))
    step = step_of(PROGRAMS["scanned"])
    made = plan(step, params, x, plan="fsdp:8", gather="prefetch")
    read = Plan.from_json(made.to_json()).bind(step, params, x)
    assert read.gather == "prefetch" and read.notes == made.notes
    assert carried(read.jit().lower(params, x).as_text()) == 4
