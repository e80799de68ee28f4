"""One training step of programs of other libraries: gradients, state and losses equal those of one device."""

import importlib
import importlib.util

import pytest

from tests.foreign import one_step
from tests.foreign.table import LIBRARIES

OF_EXTRA = {
    "distrax_models": "rlax", "diffrax_equations": "diffrax", "e3nn_networks": "e3nn_jax", "equimo_models": "equimo",
    "flowjax_flows": "flowjax", "jraph_networks": "jraph",
}  # fmt: skip


def _cases():
    for library in LIBRARIES:
        if library in OF_EXTRA and importlib.util.find_spec(OF_EXTRA[library]) is None:
            # `make test` does not install this extra. `make test-all` does, so that nothing is skipped there.
            reason = f"needs {OF_EXTRA[library]}, of the extra `libraries`"
            yield pytest.param(None, id=library, marks=[pytest.mark.slow, pytest.mark.skip(reason)])
            continue
        for make in importlib.import_module(f"tests.foreign.libraries.{library}").PROGRAMS:
            quick = (library, make.__name__) in (("optax_updates", "muon"), ("nnx_modules", "embedding"))
            marks = [pytest.mark.whole] if quick else [pytest.mark.slow]
            yield pytest.param(make, id=f"{library}-{make.__name__}", marks=marks)


@pytest.mark.few(1)
@pytest.mark.parametrize("make", list(_cases()))
def test_one_step_equals_one_device(make):
    """Each of our warnings is an error: all operators have rules."""
    program = make()
    single = one_step.run(program)
    for plan in program.plans:
        sharded = one_step.run(program, plan)
        for one, other in ((single.grads, sharded.grads), (single.others, sharded.others)):
            wrong = {k: e for k, e in one_step.errors(one, other).items() if not e <= program.tolerance}
            assert wrong == {}, plan
        assert sharded.share < 1
