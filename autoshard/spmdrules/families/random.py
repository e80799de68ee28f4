"""Random keys and bits.

The bits of an element depend on the global shape, so generating bits for a shard's shape alone would give other bits.
Instead, a shard generates the global bits and takes its slice. XLA's partitioner generates only the slice, without
communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax

from autoshard._compat import primitive, primitives
from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Body, Dims, Rule, Shard
from autoshard.spmdrules.core.rule_builder import RuleBuilder
from autoshard.spmdrules.families.elementwise import pointwise


def sliced_from_full(make: Any, *results: Dims) -> Body:
    """Returns a body that computes the global results by `make(*operands)` and slices its shard from each."""

    def body(shard: Shard, *operands: Any) -> Any:
        full = make(*operands)
        if not isinstance(full, (list, tuple)):
            return _slice(shard, full, results[0])
        return [_slice(shard, x, dims) for x, dims in zip(full, results, strict=True)]

    return body


def _slice(shard: Shard, x: Any, dims: Dims) -> Any:
    for axis, dim in enumerate(dims):
        if len(dim) == 1 and shard.rule.factor(dim[0]).kind == "offset" and shard.count(dim[0]) > 1:
            x = lax.dynamic_slice_in_dim(x, shard.offset(dim[0]), shard.size(dim[0]), axis)
    return x


def _binds(name: str, params: Mapping[str, Any]) -> Any:
    found = primitive(name)
    assert found is not None
    return lambda *operands: found.bind(*operands, **params)


@rule(primitive("random_bits"))
def random_bits(keys: Any, *, shape: Sequence[int], **params: Any) -> Rule:
    """``[] -> a b; offset a b``: random bits from a key; a batch of keys passes, ``k -> k a``.

    https://docs.jax.dev/en/latest/_autosummary/jax.random.bits.html
    """
    return _generated("random_bits", keys, shape, {**params, "shape": tuple(shape)})


@rule(primitive("random_split"))
def random_split(keys: Any, *, shape: Sequence[int], **params: Any) -> Rule:
    """``[] -> a; offset a``: new keys from a key; a batch of keys passes, ``k -> k a``.

    https://docs.jax.dev/en/latest/_autosummary/jax.random.split.html
    """
    return _generated("random_split", keys, shape, {**params, "shape": tuple(shape)})


def _generated(name: str, keys: Any, shape: Sequence[int], params: Mapping[str, Any]) -> Rule:
    build = RuleBuilder()
    batch = tuple(build.dim("k", n) for n in keys.shape)
    result = (*batch, *(build.next(n, "offset") for n in shape))
    return build.rule([batch], [result], body=sliced_from_full(_binds(name, params), result))


@rule(primitive("random_seed"))
def random_seed(seeds: Any, **_: Any) -> Rule:
    """``a -> a``: a key from each seed.

    https://docs.jax.dev/en/latest/_autosummary/jax.random.key.html
    """
    return pointwise(seeds)


@rule(primitive("random_wrap"))
def random_wrap(data: Any, *, impl: Any, **_: Any) -> Rule:
    """``a w -> a; whole w``: a key from its words.

    https://docs.jax.dev/en/latest/_autosummary/jax.random.wrap_key_data.html
    """
    words = len(impl.key_shape)
    build = RuleBuilder()
    batch = build.dims(data.shape[: len(data.shape) - words])
    return build.rule([(*batch, *map(build.whole, impl.key_shape))], [batch])


@rule(primitive("random_unwrap"))
def random_unwrap(keys: Any, **_: Any) -> Rule:
    """``a -> a w; whole w``: the words of a key.

    https://docs.jax.dev/en/latest/_autosummary/jax.random.key_data.html
    """
    build = RuleBuilder()
    batch = build.dims(keys.shape)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(keys.shape, keys.dtype))
    return build.rule([batch], [(*batch, *map(build.whole, data.shape[len(batch) :]))])


@rule(primitive("random_fold_in"))
def random_fold_in(keys: Any, data: Any, **_: Any) -> Rule:
    """``[], a -> a``: a new key from a key and a number; either may be a scalar.

    https://docs.jax.dev/en/latest/_autosummary/jax.random.fold_in.html
    """
    return pointwise(keys, data)


@rule(primitive("threefry2x32"), primitive("philox2x32"))
def two_words(*words: Any, **_: Any) -> Rule:
    """``a, a, a, a -> a, a``: two words from the words of a key and of a counter, element by element.

    https://docs.jax.dev/en/latest/jax.random.html
    """
    return pointwise(*words, results=2)


@rule(primitive("threefry4x32"), primitive("philox4x32"))
def four_words(*words: Any, **_: Any) -> Rule:
    """``a, a, a, a, a, a, a, a -> a, a, a, a``: four words from the words of a key and of a counter.

    https://docs.jax.dev/en/latest/jax.random.html
    """
    return pointwise(*words, results=4)


@rule(primitive("random_clone"))
def random_clone(keys: Any, **_: Any) -> Rule:
    """``a -> a``: the same keys, marked as not yet used.

    https://docs.jax.dev/en/latest/_autosummary/jax.random.clone.html
    """
    return pointwise(keys)


@rule(primitive("iota_2x32_shape"))
def iota_2x32_shape(*, shape: Sequence[int]) -> Rule:
    """``-> a b, a b; offset a b``: the position of each element, as a high word and a low word.

    https://docs.jax.dev/en/latest/jax.random.html
    """
    build = RuleBuilder()
    dims = tuple(build.next(n, "offset") for n in shape)
    body = sliced_from_full(_binds("iota_2x32_shape", {"shape": tuple(shape)}), dims, dims)
    return build.rule([], [dims, dims], body=body)


@rule(lax.rng_bit_generator_p)
def rng_bit_generator(key: Any, *, shape: Sequence[int], **params: Any) -> Rule:
    """``w -> w, a b; whole w; offset a b``: the next state, and random bits.

    https://openxla.org/stablehlo/spec#rng_bit_generator
    """
    build = RuleBuilder()
    bits = tuple(build.next(n, "offset") for n in shape)
    state = tuple(map(build.whole, key.shape))
    body = sliced_from_full(_binds("rng_bit_generator", {**params, "shape": tuple(shape)}), state, bits)
    return build.rule([state], [state, bits], body=body)


@rule(*primitives("rng_uniform"))
def rng_uniform(low: Any, high: Any, *, shape: Sequence[int], **_: Any) -> Rule:
    """``[], [] -> w; whole w``: random numbers without a key, which each shard would draw differently.

    https://openxla.org/stablehlo/spec#rng
    """
    build = RuleBuilder()
    return build.rule([(), ()], [tuple(map(build.whole, shape))])


@rule(primitive("random_gamma"))
def random_gamma(keys: Any, alphas: Any, **_: Any) -> Rule:
    """``k, k w -> k w; whole w``: a gamma sample for each alpha; each key is split over all of its alphas.

    https://docs.jax.dev/en/latest/_autosummary/jax.random.gamma.html
    """
    build = RuleBuilder()
    batch = tuple(build.dim("k", n) for n in keys.shape)
    dims = (*batch, *map(build.whole, alphas.shape[len(batch) :]))
    return build.rule([batch, dims], [dims])
