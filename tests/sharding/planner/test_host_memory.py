"""The host's memory limits what plans offload."""

import dataclasses
import math
import warnings

import jax
import jax.numpy as jnp
import pytest

from autoshard import Plan, plan
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.machines.targets import find_target, write_target

LAYERS, ROWS, WIDTH = 4, 1024, 256
RESIDUALS = LAYERS * ROWS * WIDTH * 4 / 8  # bytes on one of 8 devices


def gradient(layers, x):
    def loss(layers):
        return jnp.sum(jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, layers)[0])

    return jax.grad(loss)(layers)


SHAPES = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "float32"), jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")


@pytest.fixture
def target_of(tmp_path):
    """Write v5e:2x4 with another memory of the host."""

    def write(host_memory_bytes, name="machine", **figures):
        target = find_target("v5e:2x4")
        chip = dataclasses.replace(target.chip, host_memory_bytes=host_memory_bytes, **figures)
        path = tmp_path / f"{name}.toml"
        write_target(dataclasses.replace(target, chip=chip), path)
        return str(path)

    return write


def test_limits_of_chips():
    assert CHIPS["v5p"].host_limit_bytes == pytest.approx(0.9 * 112e9)
    assert CHIPS["v6e"].host_limit_bytes == 128 * 2**30, "the compiler accepts no more of the host's 180 GB"
    assert dataclasses.replace(CHIPS["v5p"], host_memory_bytes=0.0).host_limit_bytes == 128 * 2**30
    assert CHIPS["h200"].host_limit_bytes == pytest.approx(0.9 * 369e9)
    assert CHIPS["cpu"].host_limit_bytes == math.inf  # unknown


def test_a_request_beyond_the_memory_of_the_host_warns_with_both_figures(target_of):
    small = target_of(RESIDUALS / 2)
    with pytest.warns(
        AutoshardWarning, match=r"keeps 512 KiB of each device in the host's memory, .* limit of 230 KiB"
    ):
        made = plan(gradient, *SHAPES, target=small, plan="dp:8", offload="residual")
    assert made.fits_device and not made.fits_host and not made.fits
    assert made.estimate.host_memory_bytes == RESIDUALS and made.host_limit_bytes == 0.9 * RESIDUALS / 2
    assert any("more than the limit of 230 KiB: offload fewer values" in note for note in made.notes)
    assert "does not fit the 230 KiB of host memory of a device" in " ".join(str(made).split())
    assert not Plan.from_json(made.to_json()).fits


def test_a_request_within_it_does_not(target_of):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = plan(gradient, *SHAPES, target=target_of(2 * RESIDUALS), plan="dp:8", offload="residual")
        assert made.fits and made.host_limit_bytes == 0.9 * 2 * RESIDUALS
        without = plan(gradient, *SHAPES, target="v5e:2x4", plan="dp:8")
    assert without.fits and "host_limit_bytes" not in without.to_json()


def test_auto_does_not_choose_what_the_host_cannot_hold(target_of):
    """The step fits with offload only."""
    peaks = [
        plan(gradient, *SHAPES, target="v5e:2x4", plan="dp:8", offload=word).estimate.peak_memory_bytes
        for word in ("none", "residual")
    ]
    limit = sum(peaks) / 2
    options = {"plan": "dp:8", "memory_limit_bytes": limit, "offload": "auto"}
    assert plan(gradient, *SHAPES, target=target_of(2 * RESIDUALS), **options).offload
    with pytest.raises(PlanError, match="the requested plan does not fit"):
        plan(gradient, *SHAPES, target=target_of(RESIDUALS / 2, "small"), **options)
