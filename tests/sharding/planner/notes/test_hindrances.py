"""Notes on Python callbacks, loops of unknown length and sorts over the batch; errors about shapes from values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard import plan
from autoshard.errors import AutoshardWarning

WEIGHTS, ROWS = jnp.zeros((64, 64)), jnp.zeros((128, 64))


def notes_of(rows_of, **options):
    """The notes of a plan for a step whose loss is the mean of what `rows_of` returns."""

    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(rows_of(w, x) ** 2))(w)
        return w - 0.1 * gradient, value

    return plan(step, WEIGHTS, ROWS, **{"target": "v5e:2x4", **options}).notes


def in_a_loop(called):
    def rows_of(w, x):
        def body(x, _):
            x = x @ w
            return x + called(lax.stop_gradient(x)), None

        return lax.scan(body, x, None, length=3)[0]

    return rows_of


def printed(x):
    jax.debug.callback(lambda _: None, x)
    return 0.0


def test_a_callback_in_a_loop_has_a_note_with_its_line_and_number_of_calls():
    (note,) = notes_of(in_a_loop(printed))
    assert note.startswith("debug_callback at ") and "test_hindrances.py" in note and "printed)" in note
    assert "in a loop, 3 times a step" in note and "32.0 KiB" in note


def test_a_callback_with_a_number_in_a_loop_is_not_said_to_gather_arrays():
    (note,) = notes_of(in_a_loop(lambda x: printed(x.mean())))
    assert note.endswith("in a loop, 3 times a step. The estimate does not include this time. Call it after the loop")


def test_a_callback_without_a_rule_has_a_warning_and_a_note():
    with pytest.warns(AutoshardWarning, match="pure_callback' at .*test_hindrances.py"):
        (note,) = notes_of(in_a_loop(lambda x: jax.pure_callback(np.asarray, x, x)))
    assert note.startswith("pure_callback at ") and "64.0 KiB" in note  # there and back


@pytest.mark.parametrize("called", [lambda x: jnp.sin(x), lambda x: 0.0 * x.mean()], ids=["sine", "mean"])
def test_other_loops_have_no_note(called):
    assert not notes_of(in_a_loop(called))


def test_a_callback_outside_of_loops_has_no_note():
    assert not notes_of(lambda w, x: x @ w + printed(x))


def test_a_loop_of_unknown_length_has_a_note():
    def settled(w, x):
        return lax.stop_gradient(lax.while_loop(lambda x: jnp.mean(x) > 0.1, lambda x: jnp.tanh(x @ w), x)) @ w

    (note,) = notes_of(settled)
    assert note.startswith("the loop at ") and "settled)" in note and "counts one iteration" in note


@pytest.mark.parametrize(
    ("plan_text", "effect"), [("dp:8", "each device gathers it"), ("tp:8", "does not shard the batch")]
)
def test_a_sort_over_the_batch_has_a_note(plan_text, effect):
    def ordered(w, x):
        return jnp.sort(x @ w, axis=0)  # the line of the call: `jnp.sort` has none of its own

    note = next(note for note in notes_of(ordered, plan=plan_text) if "sort" in note)
    assert note.startswith("sort at ") and "ordered)" in note and "128 rows" in note and effect in note


def test_a_sort_within_rows_has_no_note():
    assert not [note for note in notes_of(lambda w, x: jnp.sort(x @ w, axis=1), plan="dp:8") if "sort" in note]


def test_shapes_that_depend_on_values_are_an_error_with_the_line():
    def chosen(w, x):
        return (x @ w)[x[:, 0] > 0]

    with pytest.raises(jax.errors.NonConcreteBooleanIndexError) as caught:
        notes_of(chosen)
    (note,) = (each for each in caught.value.__notes__ if each.startswith("auto_shard"))
    assert note.startswith("auto_shard(step): the program needs a value at ")
    assert "test_hindrances.py" in note and "chosen)" in note and "jnp.where" in note
