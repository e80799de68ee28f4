"""Tests on one attached accelerator: `JAX_PLATFORMS=cuda,cpu`. The CPU computes the references."""

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def an_accelerator_is_attached() -> None:
    assert jax.default_backend() != "cpu", "JAX_PLATFORMS must name the accelerator first: JAX_PLATFORMS=cuda,cpu"


@pytest.fixture
def full_precision():
    """Computes float32 products in float32, on GPUs too, which use TF32 by default."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def on_gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU: cuDNN runs on NVIDIA GPUs only")
