"""The table of factorisations, solvers and Fourier transforms."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard import _compat
from tests.spmdrules.rows import Row, exists, f32, numbers, of

SQUARE = np.tril(numbers(4, 3, 3)) + 3 * np.eye(3, dtype=np.float32)
POSITIVE = SQUARE @ SQUARE.transpose(0, 2, 1)
LARGE = np.tril(numbers(2, 24, 24)) / 24 + 3 * np.eye(24, dtype=np.float32)
TALL = f32(4, 5, 3)


def _bind(name, **params):
    primitive = _compat.primitive(name)
    return lambda *operands: primitive.bind(*operands, **params)  # type: ignore[union-attr]


def _whole(count):
    return "whole " + " ".join(["w", *(f"w{i}" for i in range(1, count))])


_TWO_MATRICES = f"a w w1 -> a w2 w3, a w4 w5; {_whole(6)}"
ROWS = [
    Row("cholesky", lambda x: lax.linalg.cholesky(x, symmetrize_input=False), (POSITIVE,),
        f"a w w1 -> a w2 w3; {_whole(4)}"),
    Row("householder_product", lax.linalg.householder_product, (TALL, f32(4, 3)),
        f"a w w1, a w2 -> a w3 w4; {_whole(5)}"),
    Row("cholesky_update", lax.linalg.cholesky_update, (POSITIVE[0], numbers(3)), f"w w1, w2 -> w3 w4; {_whole(5)}"),
    Row("symmetric_product", _bind("symmetric_product", alpha=1.0, beta=1.0), (TALL, f32(4, 5, 5)),
        f"a w w1, a w2 w3 -> a w4 w5; {_whole(6)}"),
    *(Row("ormqr", _bind("ormqr", left=True, transpose=False), (TALL, f32(4, 3), f32(4, 5, 2)),
          f"a w w1, a w2, a w3 n -> a w3 n; {_whole(4)}; linear 2") for _ in range(exists("ormqr"))),
    Row("eig", lax.linalg.eig, (SQUARE,), f"a w w1 -> a w2, a w3 w4, a w5 w6; {_whole(7)}"),
    Row("eigh", lambda x: lax.linalg.eigh(x, symmetrize_input=False), (POSITIVE,),
        f"a w w1 -> a w2 w3, a w4; {_whole(5)}"),
    Row("hessenberg", lax.linalg.hessenberg, (SQUARE,), f"a w w1 -> a w2 w3, a w4; {_whole(5)}"),
    Row("tridiagonal", lax.linalg.tridiagonal, (POSITIVE,), f"a w w1 -> a w2 w3, a w4, a w5, a w6; {_whole(7)}"),
    Row("lu", lax.linalg.lu, (SQUARE,), f"a w w1 -> a w2 w3, a w4, a w5; {_whole(6)}"),
    Row("lu", lax.linalg.lu, (f32(3, 3),), "w w1 -> w2 w3, w4, w5; whole w w1 w2 w3 w4 w5", "no batch"),
    Row("lu_pivots_to_permutation", lambda p: lax.linalg.lu_pivots_to_permutation(p, 3),
        (np.tile(np.array([2, 1, 2], np.int32), (4, 1)),), "a w -> a w1; whole w w1"),
    Row("geqrf", _bind("geqrf"), (TALL,), f"a w w1 -> a w2 w3, a w4; {_whole(5)}"),
    Row("geqp3", _bind("geqp3", use_magma=None), (TALL, np.zeros((4, 3), np.int32)),
        f"a w w1, a w1 -> a w2 w3, a w4, a w5; {_whole(6)}"),
    Row("qr", lambda x: lax.linalg.qr(x, full_matrices=False), (TALL,), _TWO_MATRICES),
    Row("schur", lax.linalg.schur, (SQUARE,), _TWO_MATRICES),
    Row("svd", lambda x: lax.linalg.svd(x, full_matrices=False), (TALL,),
        f"a w w1 -> a w2, a w3 w4, a w5 w6; {_whole(7)}"),
    Row("svd", lambda x: lax.linalg.svd(x, compute_uv=False), (TALL,), f"a w w1 -> a w2; {_whole(3)}", "values"),
    Row("triangular_solve", lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        (SQUARE, f32(4, 3, 8)), f"a w w1, a w2 n -> a w2 n; {_whole(3)}; linear 1"),
    Row("triangular_solve", lambda a, b: lax.linalg.triangular_solve(a, b, lower=True),
        (SQUARE, f32(4, 8, 3)), f"a w w1, a n w2 -> a n w2; {_whole(3)}; linear 1", "right"),
    Row("triangular_solve", lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        (LARGE, f32(2, 24, 8)), f"a w w1, a w2 n -> a w2 n; {_whole(3)}; linear 1", "larger"),
    Row("tridiagonal_solve", lax.linalg.tridiagonal_solve,
        (numbers(4, 5), numbers(4, 5, low=5, high=6), numbers(4, 5), f32(4, 5, 4)),
        f"a w, a w1, a w2, a w3 n -> a w3 n; {_whole(4)}; linear 3"),
    Row("fft", jnp.fft.fft, (of(jnp.complex64, 4, 8),), "a w -> a w1; whole w w1; linear 0"),
    Row("fft", jnp.fft.rfft, (f32(4, 8),), "a w -> a w1; whole w w1; linear 0", "real"),
    Row("fft", jnp.fft.irfft2, (of(jnp.complex64, 4, 4, 5),), "a w w1 -> a w2 w3; whole w w1 w2 w3; linear 0", "back"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_expected_map(row):
    assert row.rule().text == row.expected
