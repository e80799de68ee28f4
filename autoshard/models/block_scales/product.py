r"""A product with a weight that is stored as codes C and scales s of blocks. The weight is not decoded.

.. math:: y_{tn} = \sum_b s_{bn} \sum_{k \in b} x_{tk} C_{kn}

The inner sums are products with the codes, one for each block b of inputs. Their results are multiplied by the scales
and added, in float32. XLA:TPU compiles this to one kernel. It reads the codes in place, and no other array of their
size. A decoded weight would be written to memory, because XLA does not compute repeated scales inside of a product.

With few tokens, this is also less work. Each token multiplies one number for each block of inputs. Decoding multiplies
one number for each input.
"""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from autoshard.models.block_scales.blocks import decoded, joined_inputs, repeated
from autoshard.spmdrules.custom_ops.operator import operator


@functools.cache
def _operator(rule: str) -> Callable[..., jax.Array]:
    """Return `block_product` as an operator with a rule."""

    def scaled_product(x: jax.Array, codes: jax.Array, scale: jax.Array, *, spec: str, inputs: int) -> jax.Array:
        return block_product(spec, x, codes, scale, inputs)

    return operator(rule)(scaled_product)


def scaled_product(spec: str, x: jax.Array, codes: jax.Array, scale: jax.Array, inputs: int) -> jax.Array:
    """Compute `einsum(spec, x, weight)` in the dtype of x; the arguments are those of `block_product`.

    Without leading dimensions, the product is one operator. In plain products, the blocks would be batch dimensions,
    which the planner would take for experts. If `x` has more rows than a block has inputs, the weight is decoded,
    because decoding then multiplies fewer numbers.
    """
    of_x, of_weight = spec.split("->")[0].split(",")
    outputs = sum(name not in of_x for name in of_weight)
    last = codes.ndim - outputs
    rows = math.prod(size for name, size in zip(of_x, x.shape, strict=True) if name not in of_weight)
    if rows <= math.prod(codes.shape[last - 2 * inputs + 1 : last : 2]):
        if last - 2 * inputs:
            return block_product(spec, x, codes, scale, inputs)
        rule = block_product_rule(spec, codes, scale, inputs)
        return _operator(rule)(x, codes, scale, spec=spec, inputs=inputs)
    return jnp.einsum(spec, x, decoded(joined_inputs(codes, scale, inputs, outputs), scale).astype(x.dtype))


def block_product(spec: str, x: jax.Array, codes: jax.Array, scale: jax.Array, inputs: int) -> jax.Array:
    """Compute `einsum(spec, x, weight)` in the dtype of x, for a weight `[*leading, *inputs, *outputs]`.

    Args:
        spec: the product. Names of the weight's outputs have the same order in the result. Names of leading dimensions
            are also those of x; in the result they come first, or are summed.
        x: the other operand.
        codes: `[*leading, blocks, size, ..., *outputs]`, from `split_inputs`.
        scale: `[*leading, *inputs, *outputs]`, the scale of each block, float32 or powers of two in 8 bits.
        inputs: number of dimensions of the inputs.

    >>> codes, scale = jnp.ones((3, 4, 6)), jnp.arange(1.0, 7.0).reshape(3, 2)
    >>> block_product("te,ef->tf", jnp.ones((2, 12)), codes, scale, inputs=1)[0].tolist()
    [36.0, 36.0, 36.0, 48.0, 48.0, 48.0]
    """
    operands, result = spec.split("->")
    of_x, of_weight = operands.split(",")
    outer = "".join(name for name in of_weight if name not in of_x)
    last = len(of_weight) - len(outer)
    first = last - inputs
    lead, unused = of_weight[:first], iter(name for name in string.ascii_letters if name not in spec)
    blocks = dict(zip(of_weight[first:last], unused, strict=False))  # input -> name of its blocks
    counts = dict(zip(blocks, scale.shape[first:last], strict=True))
    whole = joined_inputs(codes, scale, inputs, len(outer)).shape

    def split(names: str, shape: Sequence[int]) -> tuple[str, list[int]]:
        """Split the inputs among dimensions into blocks. Those parts of an input that have size 1 are left out."""
        parts = [
            part
            for name, size in zip(names, shape, strict=True)
            for part in (
                [(blocks[name], counts[name]), (name, size // counts[name])] if name in blocks else [(name, size)]
            )
            if part[1] > 1 or name not in blocks
        ]
        return "".join(name for name, _ in parts), [size for _, size in parts]

    x_names, x_shape = split(of_x, x.shape)
    weight_names, weight_shape = split(of_weight, whole)
    kept = lead + "".join(block for name, block in blocks.items() if counts[name] > 1)
    partial = kept + "".join(name for name in result if name not in lead)
    sums = jnp.einsum(
        f"{x_names},{weight_names}->{partial}",
        x.reshape(x_shape),
        codes.reshape(weight_shape).astype(x.dtype),
        preferred_element_type=jnp.float32,
    )
    scale = repeated(scale.astype(jnp.float32), whole, first=last)
    sizes = dict(zip(lead, scale.shape, strict=False)) | dict(zip(outer, scale.shape[last:], strict=True))
    sizes |= {block: counts[name] for name, block in blocks.items()}
    factors = scale.reshape([sizes.get(name, 1) for name in partial])
    return jnp.sum(sums * factors, [n for n, name in enumerate(kept) if name not in result]).astype(x.dtype)


def block_product_rule(spec: str, codes: jax.Array, scale: jax.Array, inputs: int) -> str:
    """Return the rule of `block_product` without leading dimensions. Blocks are factors of their own.

    >>> codes, scale = jnp.zeros((32, 128, 8, 64)), jnp.zeros((32, 4, 1))
    >>> block_product_rule("bse,ehd->bshd", codes, scale, 1)
    'b s (e0 e1), e0 e1 (h0 h1) d1, e0 h0 1 -> b s (h0 h1) d1; reduce e0; whole e1 h1; linear 0; linear 2'
    """
    operands, result = spec.split("->")
    of_x, of_weight = operands.split(",")
    sizes = [codes.shape[2 * n] * codes.shape[2 * n + 1] for n in range(inputs)] + list(codes.shape[2 * inputs :])
    factors: dict[str, tuple[str, ...]] = {}  # dimension -> its blocks, and the elements of a block
    for name, count, size in zip(of_weight, scale.shape, sizes, strict=True):
        factors[name] = tuple(f"{name}{n}" for n, one in enumerate((count, size // count)) if one > 1)

    def dimension(name: str) -> str:
        parts = factors.get(name, (name,))
        return f"({' '.join(parts)})" if len(parts) > 1 else "".join(parts) or "1"

    def blocks(name: str, count: int) -> str:
        return f"{name}0" if count > 1 else "1"

    def elements(name: str) -> str:
        return f"{name}1" if f"{name}1" in factors[name] else "1"

    counts = dict(zip(of_weight, scale.shape, strict=True))
    inner, outer = of_weight[:inputs], of_weight[inputs:]
    of_codes = [part for name in inner for part in (blocks(name, counts[name]), elements(name))]
    texts = (
        map(dimension, of_x),
        [*of_codes, *map(dimension, outer)],
        (blocks(name, counts[name]) for name in of_weight),
    )
    # The elements of one of several blocks stay together. A plan shards the blocks.
    whole = " ".join(parts[1] for parts in factors.values() if len(parts) > 1)
    reduced = " ".join(part for name in inner for part in factors[name] if part not in whole.split())
    text = f"{', '.join(map(' '.join, texts))} -> {' '.join(map(dimension, result))}"
    text += f"; reduce {reduced}" if reduced else ""
    text += f"; whole {whole}" if whole else ""
    return f"{text}; linear 0; linear 2"
