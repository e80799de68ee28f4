"""Small models for tests, and ways to run them with little compilation, which dominates the time of these tests."""

import dataclasses

import jax
import jax.extend
import numpy as np
import optax
from flax import nnx

from autoshard.models import GPT, GPTConfig, attention
from autoshard.train.step.train_state import make_program
from autoshard.train.step.train_step import make_eval_step, make_train_step
from tests.arrays import array

TINY = GPTConfig(vocab=32, layers=2, heads=4, kv_heads=2, width=16, ffn=24, context=12)
GPT2 = dataclasses.replace(
    TINY, kv_heads=None, norm="layernorm", positions="learned", mlp="gelu", bias=True, tie_head=False
)


def filled(cfg: GPTConfig, std: float = 0.1) -> GPT:
    """Makes a GPT whose parameters all have different values, including biases and scales."""
    return filled_as(lambda rngs: GPT(cfg, rngs=rngs), std)


def filled_as(build, std: float = 0.1):
    """Makes a model whose variables all have different values, drawn by NumPy, which compiles nothing."""
    rng = np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))

    def fill(path, x):
        name = jax.tree_util.keystr(path)
        centre = 1.0 if "scale" in name or "variance" in name else 0.0
        return array(rng.normal(centre, std, x.shape), x.dtype)

    return nnx.merge(graph, jax.tree.map_with_path(fill, state))


def quickly(fn, *args):
    """Runs `fn(*args)`, jitted without optimisation."""
    options: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
    return jax.jit(fn).lower(*args).compile(compiler_options=options)(*args)


def called(model, run, *args):
    """Runs `run(model, *args)`, compiled as one program: compiling each operator takes far longer."""
    graph, state = nnx.split(model)
    return quickly(lambda state, *args: run(nnx.merge(graph, state), *args), state, *args)


def logits_of(model, inputs, key=None):
    """Computes the model's logits, with dropout if there is a key."""
    graph, params = nnx.split(model)

    def logits(params, inputs, key):
        return nnx.merge(graph, params)(inputs, deterministic=key is None, rngs=key)

    return quickly(logits, params, inputs, key)


def count(build):
    """Counts the parameters of a model without allocating them."""
    shapes = nnx.state(nnx.eval_shape(lambda: build(nnx.Rngs(0))), nnx.Param)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def equations(jaxpr):
    """Yields all equations of a jaxpr and of its nested jaxprs."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def intermediate_shapes(jaxpr):
    """Yields the shapes of all intermediate values of a jaxpr and of its nested jaxprs."""
    return (out.aval.shape for equation in equations(jaxpr) for out in equation.outvars)


TEXT = np.frombuffer(f"{attention.__doc__}".encode("ascii")[:300], np.uint8).astype(np.int32)


def text_entropy():
    """Returns the entropy, in nats, of the text's character frequencies: the loss of a predictor without context."""
    shares = np.bincount(TEXT) / len(TEXT)
    return -np.sum(shares[shares > 0] * np.log(shares[shares > 0]))


def text_batch(step, rows, context):
    """Makes a batch of character sequences from an English text."""
    starts = np.random.default_rng(step).integers(0, len(TEXT) - context, rows)
    pieces = np.stack([TEXT[start : start + context + 1] for start in starts])
    return {"inputs": pieces[:, :-1], "targets": pieces[:, 1:], "mask": np.ones((rows, context), np.float32)}


def stripes_batch(step, rows, size, classes=8):
    """Makes a batch of noisy stripe images with random phases. The label is the direction of the stripes."""
    rng = np.random.default_rng(step)
    labels = rng.integers(0, classes, rows).astype(np.int32)
    down, right = np.mgrid[:size, :size] / size
    angle, phase = np.pi * labels / classes, rng.uniform(0, 2 * np.pi, rows)
    along = np.cos(angle)[:, None, None] * right + np.sin(angle)[:, None, None] * down
    stripes = np.sin(8 * np.pi * along + phase[:, None, None])
    images = stripes[..., None] + 0.3 * rng.normal(size=(rows, size, size, 3))
    return {"images": images.astype(np.float32), "labels": labels}


def trained(work, steps, rate=3e-3):
    """Trains a workload with the trainer's step.

    Returns:
        The losses, the final state, and a function that evaluates the state on the batch of another step.
    """
    shapes, rows = work.batch(), work.batch_size

    def batch(step):
        if "inputs" in shapes:
            return text_batch(step, rows, shapes["inputs"].shape[1])
        return stripes_batch(step, rows, shapes["images"].shape[1], work.config.classes)

    program = make_program(work.build, optax.adam(rate))
    step = jax.jit(make_train_step(program, optax.constant_schedule(rate)))
    state = jax.jit(program.create_state)(jax.random.key(0))
    losses = []
    for index in range(steps):
        state, metrics = step(state, batch(index))
        losses.append(float(metrics["loss"]))

    def evaluate(step):
        parts = state.params, state.frozen, state.variables
        total, weight = jax.jit(make_eval_step(program))(*parts, batch(step))
        return float(total / weight)

    return losses, state, evaluate
