"""Names that a checkpoint policy offloads and whose values stay on the device."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from autoshard import plan
from autoshard.errors import AutoshardWarning

X = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def offload(*names):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=names, offload_src="device", offload_dst="pinned_host"
    )


def loss_with(policy):
    """A loss of two layers. Their input and `hidden` are read by the backward pass, their result is not."""

    def layer(x, w):
        x = checkpoint_name(x, "input")
        return checkpoint_name(x + jnp.sin(checkpoint_name(x @ w, "hidden")), "result")

    def loss(w, x):
        run = jax.checkpoint(layer, policy=policy)
        return jnp.sum(run(run(x, w), w) ** 2)

    return loss


def warning_of(policy, differentiate=True):
    loss = loss_with(policy)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        plan(jax.grad(loss) if differentiate else loss, X, X, target="v5e:2x4", plan="dp:8")
    return "\n".join(str(w.message) for w in found if issubclass(w.category, AutoshardWarning))


@pytest.mark.parametrize("names", [["input"], ["hidden"], ["input", "hidden"], []])
def test_names_that_move_a_value_do_not_warn(names):
    assert warning_of(offload(*names)) == ""


def test_a_result_that_no_gradient_reads():
    text = warning_of(offload("hidden", "result"))
    assert (
        "auto_shard(loss): a policy of jax.checkpoint offloads 'result', but the backward pass reads no value" in text
    )
    assert "'hidden'" not in text


def test_a_misspelt_name():
    text = warning_of(offload("hiden"))
    assert (
        "offloads 'hiden', but no value that the step needs has that name; the names are hidden, input, result" in text
    )


def test_both_at_once():
    text = warning_of(offload("hiden", "result"))
    assert "offloads 'result', but" in text and "It offloads 'hiden', but" in text


def test_a_policy_of_a_policy_and_one_that_is_asked():
    inner = offload("hiden")

    def outer(prim, *args, **params):
        return inner(prim, *args, **params)

    assert "'hiden'" in warning_of(outer)

    def by_suffix(prim, *args, **params):
        name = params.get("name", "")
        return inner(prim, *args, **{**params, "name": "hiden"}) if name.endswith("ult") else False

    assert "'result', but the backward pass reads no value" in warning_of(by_suffix)


def test_other_policies_and_steps_without_a_gradient_do_not_warn():
    assert warning_of(jax.checkpoint_policies.dots_saveable) == warning_of(None) == ""
    assert warning_of(offload("hiden"), differentiate=False) == ""
