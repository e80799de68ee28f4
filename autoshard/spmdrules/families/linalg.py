"""Factorizations, solvers and Fourier transforms: batch dimensions pass, each problem is whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from autoshard._compat import primitive, primitives
from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Dims, Rule
from autoshard.spmdrules.core.rule_builder import RuleBuilder, pass_through

Core = Sequence[int]  # the sizes of the dimensions of one problem, without the batch dimensions


def _batched(avals: Sequence[Any], core_rank: int, cores: Sequence[Core]) -> Rule:
    """Returns the rule of a batched operator.

    Args:
        avals: the operands.
        core_rank: the number of trailing dimensions of the first operand that are not batch dimensions.
        cores: for each result, the sizes of its dimensions after the batch dimensions, which are whole.
    """
    build, batch = pass_through(avals[0].shape[: len(avals[0].shape) - core_rank])
    operands = [_whole(build, batch, a.shape[len(batch) :]) for a in avals]
    return build.rule(operands, [_whole(build, batch, core) for core in cores])


def _whole(build: RuleBuilder, batch: Dims, core: Core) -> Dims:
    return (*batch, *map(build.whole, core))


@rule(primitive("cholesky"), primitive("householder_product"))
def like_first(x: Any, *xs: Any, **_: Any) -> Rule:
    """``a w w1 -> a w2 w3; whole w w1 w2 w3``: a function from matrices to matrices of the same shape.

    https://openxla.org/stablehlo/spec#cholesky
    """
    return _batched((x, *xs), 2, [x.shape[-2:]])


@rule(primitive("cholesky_update"))
def cholesky_update(x: Any, vector: Any, **_: Any) -> Rule:
    """``w w1, w2 -> w3 w4; whole w w1 w2 w3 w4``: a Cholesky factor after a rank-1 update of its matrix.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.linalg.cholesky_update.html
    """
    return _batched((x, vector), 2, [x.shape[-2:]])


@rule(primitive("symmetric_product"))
def symmetric_product(x: Any, y: Any, **_: Any) -> Rule:
    """``a w w1, a w2 w3 -> a w4 w5; whole w w1 w2 w3 w4 w5``: alpha x x^T + beta y.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.linalg.symmetric_product.html
    """
    return _batched((x, y), 2, [y.shape[-2:]])


@rule(primitive("ormqr"))
def ormqr(x: Any, taus: Any, y: Any, *, left: bool, **_: Any) -> Rule:
    """``a w w1, a w2, a w3 n -> a w3 n; whole w w1 w2 w3; linear 2``: reflectors applied to the columns of y.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.linalg.ormqr.html
    """
    build, batch = pass_through(x.shape[:-2])
    operands = [_whole(build, batch, a.shape[len(batch) :]) for a in (x, taus)]
    sides = _sides(build, batch, y.shape[-2:], left)
    return build.rule([*operands, sides], [sides], ((2,),))


def _sides(build: RuleBuilder, batch: Dims, core: Core, left: bool) -> Dims:
    """Returns the dimensions of right-hand sides. If `left`, they are the columns of a matrix, else its rows."""
    rows, columns = core
    if left:
        return (*batch, build.whole(rows), build.dim("n", columns))
    return (*batch, build.dim("n", rows), build.whole(columns))


@rule(primitive("eig"))
def eig(x: Any, *, compute_left_eigenvectors: bool, compute_right_eigenvectors: bool, **_: Any) -> Rule:
    """``a w w1 -> a w2, a w3 w4, a w5 w6; whole w w1 w2 w3 w4 w5 w6``: eigenvalues, left and right eigenvectors.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.linalg.eig.html
    """
    core = x.shape[-2:]
    return _batched((x,), 2, [core[:1], *[core] * (compute_left_eigenvectors + compute_right_eigenvectors)])


@rule(primitive("eigh"))
def eigh(x: Any, *, subset_by_index: tuple[int, int] | None = None, **_: Any) -> Rule:
    """``a w w1 -> a w2 w3, a w4; whole w w1 w2 w3 w4``: eigenvectors and eigenvalues of symmetric matrices.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.linalg.eigh.html
    """
    n = x.shape[-1]
    count = n if subset_by_index is None else subset_by_index[1] - subset_by_index[0]
    return _batched((x,), 2, [(n, count), (count,)])


@rule(primitive("hessenberg"))
def hessenberg(x: Any, **_: Any) -> Rule:
    """``a w w1 -> a w2 w3, a w4; whole w w1 w2 w3 w4``: the Hessenberg form and its reflectors.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.linalg.hessenberg.html
    """
    return _batched((x,), 2, [x.shape[-2:], (x.shape[-1] - 1,)])


@rule(primitive("tridiagonal"))
def tridiagonal(x: Any, **_: Any) -> Rule:
    """``a w w1 -> a w2 w3, a w4, a w5, a w6; whole w w1 w2 w3 w4 w5 w6``: the tridiagonal form and its reflectors.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.linalg.tridiagonal.html
    """
    n = x.shape[-1]
    return _batched((x,), 2, [x.shape[-2:], (n,), (n - 1,), (n - 1,)])


@rule(primitive("lu"))
def lu(x: Any, **_: Any) -> Rule:
    """``a w w1 -> a w2 w3, a w4, a w5; whole w w1 w2 w3 w4 w5``: both factors in one matrix, pivots, permutation.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.linalg.lu.html
    """
    m, n = x.shape[-2:]
    return _batched((x,), 2, [(m, n), (min(m, n),), (m,)])


@rule(primitive("lu_pivots_to_permutation"))
def lu_pivots_to_permutation(pivots: Any, *, permutation_size: int, **_: Any) -> Rule:
    """``a w -> a w1; whole w w1``: row swaps as a permutation.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.linalg.lu_pivots_to_permutation.html
    """
    return _batched((pivots,), 1, [(permutation_size,)])


@rule(primitive("geqrf"))
def geqrf(x: Any, **_: Any) -> Rule:
    """``a w w1 -> a w2 w3, a w4; whole w w1 w2 w3 w4``: the reflectors of a QR factorization.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.linalg.qr.html
    """
    return _batched((x,), 2, [x.shape[-2:], (min(x.shape[-2:]),)])


@rule(primitive("geqp3"))
def geqp3(x: Any, pivots: Any, **_: Any) -> Rule:
    """``a w w1, a w1 -> a w2 w3, a w4, a w5; whole w w1 w2 w3 w4 w5``: a QR factorization with column pivoting.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.linalg.qr.html
    """
    build, batch = pass_through(x.shape[:-2])
    rows, columns = map(build.whole, x.shape[-2:])  # one pivot for each column; LAPACK does not check their number
    results = (x.shape[-2:], pivots.shape[-1:], (min(x.shape[-2:]),))
    return build.rule([(*batch, rows, columns), (*batch, columns)], [_whole(build, batch, core) for core in results])


@rule(primitive("qr"))
def qr(x: Any, *, full_matrices: bool, pivoting: bool = False, **_: Any) -> Rule:
    """``a w w1 -> a w2 w3, a w4 w5; whole w w1 w2 w3 w4 w5``: an orthogonal factor and a triangular one.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.linalg.qr.html
    """
    m, n = x.shape[-2:]
    k = m if full_matrices else min(m, n)
    return _batched((x,), 2, [(m, k), (k, n), *([(n,)] if pivoting else [])])


@rule(primitive("schur"))
def schur(x: Any, *, compute_schur_vectors: bool, **_: Any) -> Rule:
    """``a w w1 -> a w2 w3, a w4 w5; whole w w1 w2 w3 w4 w5``: the Schur form and its vectors.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.linalg.schur.html
    """
    return _batched((x,), 2, [x.shape[-2:]] * (2 if compute_schur_vectors else 1))


@rule(primitive("svd"))
def svd(
    x: Any, *, full_matrices: bool, compute_uv: bool, subset_by_index: tuple[int, int] | None = None, **_: Any
) -> Rule:
    """``a w w1 -> a w2, a w3 w4, a w5 w6; whole w w1 w2 w3 w4 w5 w6``: singular values and vectors.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.linalg.svd.html
    """
    m, n = x.shape[-2:]
    rank = min(m, n)
    if subset_by_index is not None:
        rank = min(rank, subset_by_index[1] - subset_by_index[0])
    vectors = [(m, m if full_matrices else rank), (n if full_matrices else rank, n)]
    return _batched((x,), 2, [(rank,), *(vectors if compute_uv else [])])


@rule(primitive("triangular_solve"))
def triangular_solve(x: Any, y: Any, *, left_side: bool = False, **_: Any) -> Rule:
    """``a w w1, a w2 n -> a w2 n; whole w w1 w2; linear 1``: right-hand sides are solved independently; each is whole.

    https://openxla.org/stablehlo/spec#triangular_solve
    """
    build, batch = pass_through(x.shape[:-2])
    operand = _whole(build, batch, x.shape[-2:])
    sides = _sides(build, batch, y.shape[-2:], left_side)
    return build.rule([operand, sides], [sides], ((1,),))


@rule(primitive("tridiagonal_solve"))
def tridiagonal_solve(low: Any, diagonal: Any, up: Any, y: Any, **_: Any) -> Rule:
    """``a w, a w1, a w2, a w3 n -> a w3 n; whole w w1 w2 w3; linear 3``: independent right-hand sides, each whole.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.linalg.tridiagonal_solve.html
    """
    build, batch = pass_through(low.shape[:-1])
    diagonals = [_whole(build, batch, a.shape[-1:]) for a in (low, diagonal, up)]
    sides = (*batch, build.whole(y.shape[-2]), build.dim("n", y.shape[-1]))
    return build.rule([*diagonals, sides], [sides], ((3,),))


@rule(*primitives("fft"))
def fft(x: Any, *, fft_type: Any, fft_lengths: Sequence[int], **_: Any) -> Rule:
    """``a w -> a w1; whole w w1; linear 0``: a Fourier transform of the trailing dimensions, which are whole.

    https://openxla.org/stablehlo/spec#fft
    """
    lengths = list(fft_lengths)
    if fft_type == lax.FftType.RFFT:
        lengths[-1] = lengths[-1] // 2 + 1
    return _batched((x,), len(lengths), [lengths]).where(linear=((0,),))
