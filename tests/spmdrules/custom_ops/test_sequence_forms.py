"""The forms of attention over a sharded sequence, and those of attention under `jax.vmap`."""

import jax
import jax.numpy as jnp

from autoshard.kernels.blockwise_attention import Softmax
from autoshard.kernels.splash_attention import splash_attention
from autoshard.kernels.visibility import Visibility
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.custom_ops.sequence_forms import sequence_forms_of

QUERIES, KEYS = jnp.zeros((2, 8, 4, 2, 8)), jnp.zeros((2, 8, 4, 8))  # [batch, seq, heads, group, dim], no group in keys


def equation(stages=0):
    """Return the equation of causal attention, for `stages` batches at once."""

    def fn(q, k, v):
        return splash_attention(Softmax(Visibility(causal=True), 1.0), q, k, v, plain=True)

    args = QUERIES, KEYS, KEYS
    if stages:
        fn, args = jax.vmap(fn), [jnp.broadcast_to(x, (stages, *x.shape)) for x in args]
    forward = jax.make_jaxpr(lambda *args: jax.vjp(fn, *args)[0])(*args)
    (eqn,) = (eqn for eqn in forward.eqns if "attention" in eqn.primitive.name)
    return eqn.params, [v.aval for v in eqn.invars]


def test_forms_under_vmap_have_a_leading_dimension_and_the_costs_of_all_its_elements():
    one, (params, avals) = sequence_forms_of(*equation()), equation(stages=3)
    forms = sequence_forms_of(params, avals)
    assert one is not None and forms is not None
    assert (forms.sequence, forms.heads, forms.keys) == (one.sequence, one.heads, one.keys)
    for form, single in ((forms.gathered, one.gathered), (forms.ring, one.ring)):
        assert form is not None and single is not None
        rule, declared = Rule.parse(form.text, *avals), Rule.parse(params["text"], *avals)
        stages = rule.results[0][0]
        assert stages == declared.results[0][0] and rule.by_name[stages[0]].size == 3
        assert rule.operands[3] == declared.operands[3] == ((one.sequence,),), "all stages have the same positions"
        shards = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        alone = single.cost(2, *(jax.ShapeDtypeStruct(x.shape[x.ndim > 1 :], x.dtype) for x in avals))
        cost = form.cost(2, *shards)
        assert cost.hops == alone.hops and cost.kernels[0].flops == 3 * alone.kernels[0].flops > 0
        assert (cost.hop_bytes, cost.exchange_bytes) == (3 * alone.hop_bytes, 3 * alone.exchange_bytes)
