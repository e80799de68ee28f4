"""Compares the plan of each benchmark case with its golden plan; `make golden` stores intended changes."""

import difflib
import warnings

import pytest

from autoshard.errors import AutoshardWarning
from tests.golden.golden import CASES, FOLDER, best_variant, is_locked_jax, planned, stored, summary, text, variant_rows

# Over 4 s each.
LONG = ("llama2-70b", "mixtral-8x7b", "moe-2.4b", "moe-10b", "wide-resnet-250m", "wide-resnet-1b", "vit-l16")

TIMED = ("time", "variants")  # differ by up to 1 % between JAX versions, which trace some derivatives differently


def check(name, now):
    """Compares a summary with the golden plan; without times if JAX is not the locked version."""
    stored_plan, left_out = stored(name), () if is_locked_jax() else TIMED
    before, after = (
        [*text({k: v for k, v in x.items() if k not in left_out}).splitlines()] for x in (stored_plan, now)
    )
    changed = [line.rstrip() for line in difflib.unified_diff(before, after, f"{name}, stored", f"{name}, now", n=1)]
    if changed:
        pytest.fail(
            "\n".join(["The plan has changed. If this is intended, run `make golden`.", *changed]),
            pytrace=False,
        )


@pytest.mark.few(2)
@pytest.mark.whole
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in CASES])
def test_the_plan_is_unchanged(name):
    stored_plan = stored(name)
    check(
        name,
        summary(planned(name, *stored_plan["variant"]), stored_plan["variant"]) | {"variants": stored_plan["variants"]},
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_best_variant_is_unchanged(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)  # for variants that do not fit
        variant = best_variant(name)
        check(name, summary(planned(name, *variant), variant) | {"variants": variant_rows(name)})


def test_exactly_the_cases_are_stored():
    assert {file.stem for file in FOLDER.glob("*")} == set(CASES)
    assert sum(file.stat().st_size for file in FOLDER.glob("*")) < 2**20
