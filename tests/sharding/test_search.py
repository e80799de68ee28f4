"""The fastest candidate that fits is the one, whatever the memory."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.errors import AutoshardWarning
from autoshard.sharding.plan import PlanError
from tests.sharding.programs import OPTIMIZER, adamw_step, batch, mlp_state


def test_the_fastest_candidate_that_fits_is_taken():
    state = jax.eval_shape(lambda: (mlp_state(hidden=1024), OPTIMIZER.init(mlp_state(hidden=1024))))
    free = plan(adamw_step, state, batch(), donate_argnums=0)
    peaks = sorted({peak for _, _, peak in free.candidates})
    chosen = set()
    for limit in (peaks[0], peaks[len(peaks) // 2], peaks[-1]):
        made = plan(adamw_step, state, batch(), donate_argnums=0, memory_limit_bytes=limit)
        fastest = min(us for _, us, peak in free.candidates if peak <= limit)
        assert made.estimate.peak_memory_bytes <= limit
        assert made.estimate.step_time_us == pytest.approx(fastest, abs=1e-3)
        chosen.add(made.chosen)
    assert len(chosen) > 1 and made.chosen == free.chosen
    with pytest.raises(PlanError, match="no plan fits"):
        plan(adamw_step, state, batch(), donate_argnums=0, memory_limit_bytes=peaks[0] - 1)


def test_a_fast_variant_that_does_not_fit_loses_to_a_slow_one_that_does():
    def fn(x, w, *, careful):
        if not careful:
            return jnp.tanh(jnp.einsum("bk,ckn->bcn", x, w)).sum((1, 2))

        def part(total, w):
            return total + (jnp.tanh(x @ w) + jnp.tanh(x @ -w) + jnp.tanh(x @ w)).sum(1), None

        return jax.lax.scan(part, jnp.zeros(len(x)), w)[0]

    x, w = jax.ShapeDtypeStruct((2**15, 512), "float32"), jax.ShapeDtypeStruct((64, 512, 4096), "float32")
    with pytest.warns(AutoshardWarning, match="fits"):
        fast = plan(fn, x, w, target="cpu:8", plan="dp:8", variants={"careful": [False]})
        made = plan(fn, x, w, target="cpu:8", plan="dp:8", variants={"careful": [False, True]})
    assert made.fits and not fast.fits and made.notes[0] == "variant: {'careful': True}"
    assert made.estimate.step_time_us > fast.estimate.step_time_us
