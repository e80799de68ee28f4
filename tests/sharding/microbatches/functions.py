"""Functions of weights and a batch that a cut into microbatches must compute alike, or refuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.arrays import array

KEY = jax.random.key(0)
WEIGHTS, ROWS = (array(np.random.default_rng(rows).normal(size=(rows, 4)), jnp.float32) for rows in (4, 8))
TOKENS = array(np.random.default_rng(0).integers(0, 4, (8, 5)), jnp.int32)

# The second argument is `x`, rows of floats, or `t`, rows of integers.
FUNCTIONS = {
    "iota rows": lambda w, x: (x @ w * jnp.arange(8.0)[:, None]).sum(),
    "one_hot rows": lambda w, x: (jax.nn.one_hot(jnp.arange(8), 8) @ x @ w).sum(1),
    "eye mul": lambda w, x: jnp.trace(x @ w @ x.T),
    "softmax batch": lambda w, x: jax.nn.softmax(x @ w, 0).sum(0),
    "cummax": lambda w, x: jax.lax.cummax(x @ w, 1),
    "reverse feature": lambda w, x: ((x @ w)[:, ::-1] * x).sum(0),
    "roll batch": lambda w, x: jnp.roll(x @ w, 1, 0) * x,
    "take rows": lambda w, x: jnp.tanh(x @ w)[jnp.array([0, 3, 5])],
    "argmax rows": lambda w, x: jnp.argmax(x @ w, 0),
    "argmax feat": lambda w, x: jnp.argmax(x @ w, 1),
    "topk": lambda w, x: jax.lax.top_k(x @ w, 2)[0].sum(0),
    "sort batch": lambda w, x: jnp.sort(x @ w, 0),
    "vmap": lambda w, x: jax.vmap(lambda r: jnp.tanh(w @ r))(x).sum(0),
    "vmap rng": lambda w, x: (
        jax.vmap(lambda r, one: r * jax.random.normal(one, r.shape))(x, jax.random.split(KEY, 8)).sum(0) @ w
    ),
    "rng rows": lambda w, x: (jax.random.normal(KEY, x.shape) * x @ w).sum(0),
    "rng perm": lambda w, x: jax.random.permutation(KEY, x @ w, 0),
    "reshape split": lambda w, x: (x.reshape(2, 4, 4) @ w).sum((0, 2)),
    "reshape split2": lambda w, x: (x.reshape(4, 2, 4) @ w).sum((0, 2)),
    "merge T": lambda w, x: (
        (jnp.swapaxes(x[:, None, :] * jnp.ones((8, 3, 1)), 0, 1).reshape(24, 4) @ w).reshape(3, 8, 4).sum(0)
    ),
    "einsum outer": lambda w, x: jnp.einsum("bi,bj,ij->b", x, x, w),
    "grad tanh": lambda w, x: jax.grad(lambda w: jnp.tanh(x @ w).sum() ** 2)(w),
    "grad var": lambda w, x: jax.grad(lambda w: jnp.var(jnp.tanh(x @ w)))(w),
    "grad count and one": lambda w, t: jax.grad(
        lambda w: (jnp.tanh(t @ w[:1].repeat(5, 0)) / (1 + (t > 1).sum())).sum()
    )(w),
    "grad row weights": lambda w, x: jax.grad(
        lambda w: (jnp.tanh(x @ w).sum(1) * (x[:, 0] / (1 + (x > 0).sum()))).sum()
    )(w),
    "grad logsumexp all": lambda w, x: jax.grad(lambda w: jax.nn.logsumexp(x @ w))(w),
    "scan carry sum": lambda w, x: jax.lax.scan(lambda c, _: (c + (x @ w).sum(), None), 0.0, None, length=3)[0],
    "scan carry init": lambda w, x: jax.lax.scan(lambda c, _: (c + (x @ w).sum(), c), 5.0, None, length=3),
    "scan mul carry": lambda w, x: jax.lax.scan(lambda c, _: (c * 2 + (x @ w).sum(), c), 5.0, None, length=3),
    "scan batch carry zero": lambda w, x: jax.lax.scan(
        lambda c, _: (jnp.tanh(c + x @ w), c.sum(0)), jnp.zeros((8, 4)), None, length=3
    ),
    "scan swap": lambda w, x: jax.lax.scan(lambda c, _: ((c[1], c[0] + x.sum(0)), c[0]), (w[0], w[1]), None, length=3),
    "while": lambda w, x: jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w), x).sum(),
    "cond": lambda w, x: jax.lax.cond(w[0, 0] > 0, lambda: (x @ w).sum(0), lambda: w[0]),
    "cond2": lambda w, x: jax.lax.cond(w[0, 0] < 0, lambda: (x @ w).sum(0), lambda: w[0]),
    "cond max": lambda w, x: [
        jax.lax.cond(w[0, 0] > jnp.inf, lambda: x.max(0), lambda: w[0] - 9),
        jax.lax.cond(w[0, 0] > jnp.inf, lambda: x.min(0), lambda: w[0] + 9),
        jax.lax.cond(w[0, 0] > jnp.inf, lambda: x.prod(0), lambda: w[0]),
        jax.lax.cond(w[0, 0] > jnp.inf, lambda: (x > 9).all(0), lambda: w[0] < 9),
    ],
    "scan max init": lambda w, x: jax.lax.scan(lambda c, _: (x.max(0), c), w[0] - 9, None, length=2),
    "bool max": lambda w, x: (jax.lax.reduce_max(x @ w > 0, (0,)), jax.lax.reduce_min(x @ w > 0, (0,))),
    "cond sum pred": lambda w, x: jax.lax.cond((x @ w).sum() > 0, lambda: w, lambda: w * 2),
    "where sum": lambda w, x: jnp.where((x @ w).sum() > 0, w, w * 2),
    "embed grad": lambda w, t: jax.grad(lambda w: jnp.tanh(w[t]).sum())(w),
    "embed onehot": lambda w, t: jax.grad(lambda w: jnp.tanh(jax.nn.one_hot(t, 4) @ w).mean())(w),
    "scatter set": lambda w, t: jnp.zeros((4,)).at[t[:, 0]].set(1.0) * w[0],
    "scatter add W": lambda w, t: w.at[t[:, 0]].add(jnp.ones((8, 4))),
    "scatter max": lambda w, t: w.at[t[:, 0]].max(jnp.ones((8, 4)) * t[:, :4]),
    "bincount": lambda w, t: jnp.bincount(t.ravel(), length=4) * w[0],
    "unique sort": lambda w, t: jnp.sort(t, axis=0)[0] * 1.0 @ jnp.ones((5, 4)) @ w,
    "p prod": lambda w, x: (x @ w).sum() * (x).sum(),
    "p div": lambda w, x: (x @ w).sum() / (jnp.abs(x @ w)).sum(),
    "pow": lambda w, x: ((x @ w).sum() ** 2, (x @ w).max() * 2),
    "prod": lambda w, x: jnp.prod(x @ w, 0),
    "all/any": lambda w, x: (((x @ w) > 0).all(0), ((x @ w) > 2).any(1)),
    "int": lambda w, t: (t.sum(), t.max(), (t == 2).sum(0), t.mean()),
    "pad": lambda w, x: jnp.pad(x @ w, ((0, 0), (1, 1)), constant_values=2.0).sum(0),
    "pad sum": lambda w, x: jnp.pad((x @ w).sum(0), (1, 1), constant_values=2.0),
    "pad batch": lambda w, x: jnp.pad(x @ w, ((1, 1), (0, 0)), constant_values=2.0).sum(0),
    "concat batch": lambda w, x: jnp.concatenate([x @ w, x], 0).sum(0),
    "concat sums": lambda w, x: jnp.concatenate([(x @ w).sum(0), w[0]]),
    "concat feat": lambda w, x: jnp.concatenate([x @ w, x], 1).sum(0),
    "conv": lambda w, x: jax.lax.conv_general_dilated(x.reshape(8, 1, 4), w.reshape(4, 1, 4), (1,), "SAME").sum(0),
    "conv grad": lambda w, x: jax.grad(
        lambda w: (jax.lax.conv_general_dilated(x.reshape(8, 1, 4), w.reshape(4, 1, 4), (1,), "SAME") ** 2).sum()
    )(w),
    "cholesky": lambda w, x: jnp.linalg.cholesky(jax.vmap(lambda r: jnp.outer(r, r) + jnp.eye(4))(x)).sum(0) @ w,
    "solve": lambda w, x: jnp.linalg.solve(w, x.T).sum(1),
    "qr batch": lambda w, x: jnp.linalg.qr(x @ w)[1],
    "fft": lambda w, x: jnp.abs(jnp.fft.fft(x @ w, axis=1)).sum(0),
    "fft b": lambda w, x: jnp.abs(jnp.fft.fft(x @ w, axis=0)).sum(0),
    "select per row": lambda w, t: w[t[:, 0], t[:, 1] % 4].sum(),
    "gather rows": lambda w, t: jnp.take_along_axis(t, jnp.array([[0]] * 8), 1)[:, 0] * 1.0,
    "gather batch": lambda w, t: jnp.take_along_axis(t * 1.0, jnp.zeros((1, 5), int), 0) @ jnp.ones((5, 4)) @ w,
    "dyn slice batch": lambda w, x: jax.lax.dynamic_slice_in_dim(jnp.tanh(x @ w), 2, 3),
    "dyn slice feat": lambda w, x: jax.lax.dynamic_slice_in_dim(jnp.tanh(x @ w), 2, 2, 1).sum(0),
    "dus feat": lambda w, x: jax.lax.dynamic_update_slice(jnp.tanh(x @ w), jnp.ones((8, 1)), (0, 2)).sum(0),
    "dus sum": lambda w, x: jax.lax.dynamic_update_slice(w, (x @ w).sum(0)[None], (1, 0)),
    "dus sum2": lambda w, x: jax.lax.dynamic_update_slice((x.T @ x), w[:1], (1, 0)),
    "relu fn": lambda w, x: jax.nn.relu(x @ w).sum(0),
    "custom": lambda w, x: jax.grad(lambda w: jax.nn.silu(jax.nn.relu6(x @ w)).sum())(w),
    "checkpoint": lambda w, x: jax.grad(lambda w: jax.checkpoint(lambda w: jnp.sin(jnp.sin(x @ w)))(w).sum())(w),
    "norm clip": lambda w, x: (lambda g: g / jnp.maximum(1.0, jnp.linalg.norm(g)))(
        jax.grad(lambda w: jnp.sin(x @ w).sum())(w)
    ),
    "expand": lambda w, x: (x[:, None] + x[None]).sum((0, 1)),
    "dist": lambda w, x: ((x[:, None] - x[None]) ** 2).sum(),
    "tri mask": lambda w, x: (jnp.tril(jnp.ones((8, 8))) @ (x @ w)).sum(0),
    "nan": lambda w, x: jnp.where(jnp.isnan(x @ w), 0.0, x @ w).sum(0),
    "clip sum": lambda w, x: jnp.clip((x @ w).sum(0), -1, 1),
    "segment": lambda w, t: jax.ops.segment_sum(w[t[:, 0]], t[:, 1], 4),
    "mean square": lambda w, x: jnp.sqrt(((x @ w) ** 2).mean()),
    "stop": lambda w, x: jax.lax.stop_gradient((x @ w).sum()) * w,
    "associative": lambda w, x: jax.lax.associative_scan(jnp.add, x @ w, axis=0).sum(0),
    "associative1": lambda w, x: jax.lax.associative_scan(jnp.add, x @ w, axis=1).sum(0),
    "batched w": lambda w, x: jnp.einsum("bij,bj->bi", jnp.broadcast_to(w, (8, 4, 4)), x).sum(0),
    "map": lambda w, x: jax.lax.map(lambda r: jnp.sin(w @ r), x).sum(0),
    "tile": lambda w, x: (jnp.tile(x, (2, 1)) @ w).sum(0),
    "repeat": lambda w, x: jnp.repeat(x, 2, 0) @ w,
    "repeat1": lambda w, x: (jnp.repeat(x, 2, 1) @ jnp.concatenate([w, w])).sum(0),
    "square batch w": lambda w, x: jnp.sin(x @ w).T @ jnp.sin(x @ w),
    "stack": lambda w, x: jnp.stack([x @ w, x], 1).sum(0),
    "transpose out": lambda w, x: jnp.sin(x @ w).T,
    "bool sum": lambda w, x: ((x @ w) > 0).sum(1),
    "entropy metrics": lambda w, x: (lambda p: (-(p * jnp.log(p)).sum(1).mean(), (p.argmax(1) == 1).mean()))(
        jax.nn.softmax(x @ w)
    ),
}
REFUSED = ("eye mul", "sort batch", "grad tanh", "grad var", "grad logsumexp all", "unique sort", "map")
