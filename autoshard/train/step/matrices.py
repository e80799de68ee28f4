"""Which parameters are matrices, and along which dimensions: Muon orthogonalizes the update of each matrix.

A parameter that stacks layers or experts is many matrices. Its leading dimensions are not part of them. The attention
of the built-in models has weights `[..., embed, heads, head_dim]`, whose matrix is embed x (heads head_dim).

Embeddings, heads, routers, adapters and vectors are no matrices here, as in the Muon of Jordan et al.
(https://github.com/KellerJordan/Muon): Adam updates them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from optax import contrib

from autoshard.errors import ConfigError
from autoshard.train.step.parameter_paths import matches, path_name

Axes = tuple[tuple[int, ...], tuple[int, ...]] | None

NOT = "none"

# Glob over paths -> dimensions of inputs and of outputs, counted from the end; None for no matrix. The first match
# counts. A parameter of rank 2 that matches none of them is a matrix; one of a higher rank is not.
KNOWN: Mapping[str, Axes] = {
    "*lora_*": None,
    "*embed*": None,
    "*router*": None,
    "head*": None,
    "*_head*": None,
    "*/head": None,
    "*/head/*": None,
    "*attention/w[qkv]": ((-3,), (-2, -1)),
    "*attention/wo": ((-3, -2), (-1,)),
    "*mlp/w_*": ((-2,), (-1,)),
    "*experts/w_*": ((-2,), (-1,)),
}


def read_matrices(texts: Sequence[str]) -> dict[str, Axes]:
    """Read the globs of a setting, each `GLOB=INPUTS:OUTPUTS` or `GLOB=none`.

    Raises:
        ConfigError: A text has another form.

    Example:
        >>> read_matrices(["*conv/kernel=0,1,2:3", "table=none"])
        {'*conv/kernel': ((0, 1, 2), (3,)), 'table': None}
    """
    found: dict[str, Axes] = {}
    for text in texts:
        glob, equals, axes = text.rpartition("=")
        inputs, colon, outputs = axes.partition(":")
        try:
            if not (equals and glob and (colon or axes == NOT)):
                raise ValueError(text)
            found[glob] = None if axes == NOT else (_numbers(inputs), _numbers(outputs))
        except ValueError as error:
            raise ConfigError(
                f"optimizer.matrices {text!r}: write GLOB=INPUTS:OUTPUTS with the numbers of dimensions, such as "
                f"'*conv/kernel=0,1,2:3', or GLOB={NOT}"
            ) from error
    return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def matrix_axes(name: str, rank: int, given: Mapping[str, Axes], vectors: Sequence[str] = ()) -> Axes:
    """Return the dimensions of a parameter's inputs and outputs; None if it is no matrix.

    Args:
        name: Its `/`-joined path.
        rank: Its number of dimensions.
        given: Globs of the user, which take precedence over `KNOWN`.
        vectors: Globs over paths of vectors, which have rank 2 if they are stacked.

    Raises:
        ConfigError: A dimension does not exist, or is given twice.
    """
    for glob, axes in given.items():
        if matches(name, [glob]):
            dims = [dim % rank for part in axes or () for dim in part if -rank <= dim < rank]
            if axes is not None and (len({*dims}) < sum(map(len, axes))):
                raise ConfigError(
                    f"optimizer.matrices {glob!r}: {name} has {rank} dimensions; name existing ones, each once"
                )
            return axes
    if rank < 2 or matches(name, vectors):
        return None
    for glob, axes in KNOWN.items():
        if matches(name, [glob]):
            return axes if axes is None or rank >= sum(map(len, axes)) else None
    return ((-2,), (-1,)) if rank == 2 else None


def matrix_dimensions(params: Any, given: Mapping[str, Axes], vectors: Sequence[str]) -> Any:
    """Return, for each parameter, optax's `MuonDimensionNumbers`, or None if Adam updates it.

    Raises:
        ConfigError: No parameter is a matrix, or a dimension does not exist.
    """

    def dimensions(path: Any, leaf: Any) -> Any:
        axes = matrix_axes(path_name(path), leaf.ndim, given, vectors)
        return None if axes is None else contrib.MuonDimensionNumbers(*axes)

    return jax.tree_util.tree_map_with_path(dimensions, params)


def check_matrices(params: Any, given: Mapping[str, Axes], vectors: Sequence[str]) -> None:
    """Check that there is something to orthogonalize, and that every glob is used.

    Raises:
        ConfigError: No parameter is a matrix, or a glob matches no parameter.
    """
    shapes = {path_name(path): leaf.ndim for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    if unused := [glob for glob in given if not any(matches(name, [glob]) for name in shapes)]:
        raise ConfigError(f"optimizer.matrices {' '.join(unused)}: no parameter matches; they are {', '.join(shapes)}")
    if not any(matrix_axes(name, rank, given, vectors) for name, rank in shapes.items()):
        raise ConfigError(
            f"optimizer.name muon: none of the parameters is a matrix to orthogonalize: {', '.join(shapes)}. Name the "
            "dimensions with --optimizer.matrices GLOB=INPUTS:OUTPUTS, match fewer parameters with "
            "--optimizer.no-decay, or use another optimizer"
        )
