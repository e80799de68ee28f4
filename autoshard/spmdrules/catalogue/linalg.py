"""Matrix products, decompositions, solvers and Fourier transforms. Leading dimensions are batch dimensions."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import linalg

from autoshard.spmdrules.catalogue.entry import Operator, f32


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """`x @ weight + bias`."""
    return x @ weight + bias


def addmm(x: jax.Array, a: jax.Array, b: jax.Array, scale: float = 0.5) -> jax.Array:
    """`x + scale * a @ b`."""
    return x + scale * (a @ b)


def low_rank_linear(x: jax.Array, weight: jax.Array, down: jax.Array, up: jax.Array) -> jax.Array:
    """`x @ weight + (x @ down) @ up`, a linear layer with a low-rank update (LoRA, Hu et al., 2021)."""
    return x @ weight + (x @ down) @ up


def bilinear(x: jax.Array, weight: jax.Array, y: jax.Array) -> jax.Array:
    """`x A y` for each matrix A of `weight`: [batch, n], [out, n, m], [batch, m] -> [batch, out]."""
    return jnp.einsum("bn,onm,bm->bo", x, weight, y)


def squared_distances(x: jax.Array, y: jax.Array) -> jax.Array:
    """Squared Euclidean distances between all rows of two arrays, computed with one matrix product."""
    return jnp.square(x).sum(1)[:, None] - 2 * x @ y.T + jnp.square(y).sum(1)


def least_squares(a: jax.Array, b: jax.Array) -> jax.Array:
    """The x that minimizes `|a x - b|`, by a QR decomposition."""
    q, r = jnp.linalg.qr(a)
    return lax.linalg.triangular_solve(r, jnp.einsum("...ij,...ik->...jk", q, b), left_side=True)


def cholesky_solve(a: jax.Array, b: jax.Array) -> jax.Array:
    """Solves `a x = b` for positive definite a."""
    factor = jnp.linalg.cholesky(a)
    y = lax.linalg.triangular_solve(factor, b, left_side=True, lower=True)
    return lax.linalg.triangular_solve(factor, y, left_side=True, lower=True, transpose_a=True)


def einsum(formula: str) -> partial[jax.Array]:
    """`jnp.einsum` with a fixed formula."""
    return partial(jnp.einsum, formula)


def _matrices(*shape: int, seed: int = 0) -> np.ndarray:
    """Sample matrices that are far from singular."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) + 4 * np.eye(shape[-2], shape[-1])).astype(np.float32)


def _positive_definite(*shape: int) -> np.ndarray:
    a = _matrices(*shape)
    return (a @ a.swapaxes(-1, -2)).astype(np.float32)


_SQUARE, _DEFINITE = _matrices(4, 8, 8), _positive_definite(4, 8, 8)
_TRIANGLE = np.tril(_SQUARE)
_TALL, _RIGHT = _matrices(4, 12, 8, seed=1), f32(4, 8, 12)
_SIGNAL, _IMAGES = f32(4, 8, 16), f32(4, 8, 16)
_SPECTRUM = jax.ShapeDtypeStruct((4, 8, 9), jnp.complex64)
_COMPLEX = jax.ShapeDtypeStruct((4, 8, 16), jnp.complex64)

_PRODUCTS = (
    Operator("matmul", jnp.matmul, (f32(4, 8), f32(8, 12)), (0, 1)),
    Operator("batched_matmul", jnp.matmul, (f32(4, 8, 12), f32(4, 12, 16)), (0, 1)),
    Operator("dot", jnp.dot, (f32(8), f32(8)), (0, 1)),
    Operator("inner", jnp.inner, (f32(4, 8), f32(12, 8)), (0, 1)),
    Operator("vdot", jnp.vdot, (f32(4, 8), f32(4, 8)), (0, 1)),
    Operator("vecdot", jnp.vecdot, (f32(4, 8, 12), f32(4, 8, 12)), (0, 1)),
    Operator("matvec", jnp.matvec, (f32(4, 8), f32(8)), (0, 1)),
    Operator("outer", jnp.outer, (f32(4), f32(8)), (0, 1)),
    Operator("tensordot", jnp.tensordot, (f32(4, 8, 12), f32(8, 12, 16)), (0, 1)),
    Operator("kron", jnp.kron, (f32(4, 8), f32(12, 16)), (0, 1)),
    Operator("cross", jnp.cross, (f32(4, 8, 3), f32(4, 8, 3)), (0, 1)),
    Operator("linear", linear, (f32(4, 16, 8), f32(8, 12), f32(12)), (0, 1, 2)),
    Operator("addmm", addmm, (f32(4, 12), f32(4, 8), f32(8, 12)), (0, 1, 2)),
    Operator("lora", low_rank_linear, (f32(4, 16, 8), f32(8, 12), f32(8, 20), f32(20, 12)), (0, 1, 2, 3)),
    Operator("bilinear", bilinear, (f32(4, 8), f32(16, 8, 12), f32(4, 12)), (0, 1, 2)),
    Operator("squared_distances", squared_distances, (f32(4, 8), f32(12, 8)), (0, 1)),
    Operator(
        "multi_dot", lambda a, b, c: jnp.linalg.multi_dot([a, b, c]), (f32(4, 8), f32(8, 12), f32(12, 16)), (0, 1, 2)
    ),
    Operator("matrix_power", partial(jnp.linalg.matrix_power, n=3), (f32(4, 8, 8),)),
    Operator("einsum_heads", einsum("bsd,dhk->bhsk"), (f32(4, 16, 8), f32(8, 20, 12)), (0, 1)),
    Operator("einsum_scores", einsum("bqhd,bkhd->bhqk"), (f32(4, 16, 8, 12), f32(4, 20, 8, 12)), (0, 1)),
    Operator("einsum_experts", einsum("ecd,edf->ecf"), (f32(4, 16, 8), f32(4, 8, 12)), (0, 1)),
    Operator("einsum_sum", einsum("abc,cd->d"), (f32(4, 8, 12), f32(12, 16)), (0, 1)),
    Operator("einsum_diagonal", einsum("bii->bi"), (f32(4, 8, 8),)),
    Operator("trace", partial(jnp.trace, axis1=1, axis2=2), (f32(4, 8, 8),)),
    Operator("matrix_norm", jnp.linalg.matrix_norm, (f32(4, 8, 12),)),
    Operator("matrix_2_norm", partial(jnp.linalg.matrix_norm, ord=2), (_TALL,)),
    Operator("cov", jnp.cov, (f32(4, 16),)),
    Operator("corrcoef", jnp.corrcoef, (f32(4, 16),)),
    Operator("vander", partial(jnp.vander, N=4), (f32(8),)),
)
_SOLVERS = (
    Operator("cholesky", jnp.linalg.cholesky, (_DEFINITE,)),
    Operator(
        "triangular_solve",
        partial(lax.linalg.triangular_solve, left_side=True, lower=True),
        (_TRIANGLE, _RIGHT),
        (0, 1),
    ),
    Operator("solve", jnp.linalg.solve, (_SQUARE, _RIGHT), (0, 1)),
    Operator("cholesky_solve", cholesky_solve, (_DEFINITE, _RIGHT), (0, 1)),
    Operator("least_squares", least_squares, (_TALL, f32(4, 12, 16)), (0, 1)),
    Operator("inv", jnp.linalg.inv, (_SQUARE,)),
    Operator("pinv", jnp.linalg.pinv, (_TALL,)),
    Operator("det", jnp.linalg.det, (_SQUARE,)),
    Operator("slogdet", jnp.linalg.slogdet, (_SQUARE,)),
    Operator("expm", linalg.expm, (0.1 * _SQUARE,)),
    Operator(
        "tridiagonal_solve",
        lax.linalg.tridiagonal_solve,
        (f32(4, 8), 5 + np.zeros((4, 8), np.float32), f32(4, 8), f32(4, 8, 12)),
        (0, 1, 2, 3),
    ),
)
_DECOMPOSITIONS = (
    Operator("lu", jax.vmap(linalg.lu), (_SQUARE,)),
    Operator("lu_factor", linalg.lu_factor, (_SQUARE,)),
    Operator("qr", jnp.linalg.qr, (_TALL,)),
    Operator("svd", partial(jnp.linalg.svd, full_matrices=False), (_TALL,)),
    Operator("svdvals", jnp.linalg.svdvals, (_TALL,)),
    Operator("eigh", jnp.linalg.eigh, (_DEFINITE,)),
    Operator("eigvalsh", jnp.linalg.eigvalsh, (_DEFINITE,)),
    Operator(
        "eig", jnp.linalg.eig, (_SQUARE,), (), "no gradient: JAX has none for eigenvectors of nonsymmetric matrices"
    ),
    Operator("eigvals", jnp.linalg.eigvals, (_SQUARE,)),
    Operator("schur", linalg.schur, (_SQUARE[0],), (), "no gradient: JAX has none"),
    Operator("matrix_rank", jnp.linalg.matrix_rank, (_TALL,), (), "no gradient: counts"),
)
_FOURIER = (
    Operator("fft", jnp.fft.fft, (_COMPLEX,)),
    Operator("ifft", jnp.fft.ifft, (_COMPLEX,)),
    Operator("rfft", jnp.fft.rfft, (_SIGNAL,)),
    Operator("irfft", jnp.fft.irfft, (_SPECTRUM,)),
    Operator("hfft", jnp.fft.hfft, (_SPECTRUM,)),
    Operator("ihfft", jnp.fft.ihfft, (_SIGNAL,)),
    Operator("fft2", jnp.fft.fft2, (_COMPLEX,)),
    Operator("rfft2", jnp.fft.rfft2, (_SIGNAL,)),
    Operator("irfft2", jnp.fft.irfft2, (_SPECTRUM,)),
    Operator("fftshift", partial(jnp.fft.fftshift, axes=2), (_SIGNAL,)),
    Operator("convolve", partial(jnp.convolve, mode="same"), (f32(16), f32(3)), (0, 1)),
    Operator("dct", jax.scipy.fft.dct, (_SIGNAL,)),
)
OPERATORS: tuple[Operator, ...] = (*_PRODUCTS, *_SOLVERS, *_DECOMPOSITIONS, *_FOURIER)
