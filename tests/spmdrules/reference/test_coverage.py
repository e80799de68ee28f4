"""Every JAX primitive has a status. The primitives are those alive in a fresh process, not a fixed list."""

import json

import jax
import pytest
from jax import lax
from jax.extend.core import Primitive

from autoshard.spmdrules.reference.coverage import EXEMPT, NO_RULE, STRUCTURE, UNRUN, status, statuses
from tests.spmdrules.rows import all_rows, exists

MAX_WITHOUT_RULE = 15  # chosen, not measured: the list of primitives without a rule should stay short
# Rows for primitives that only the earliest or only the latest supported JAX has.
EARLIER = {"call", "closed_call", "reduced_vary_cast_p", "hijax", "flax.nnx.variablelib"}
LATER = {"xla_metadata_call", "reduced_vary_cast"}

LISTING = """
import gc, importlib, json, pkgutil

def load(name):
    try:
        module = importlib.import_module(name)
    except ImportError:
        return
    if name == "jax.scipy" or name.startswith("jax.scipy."):
        for child in pkgutil.iter_modules(getattr(module, "__path__", ())):
            load(f"{name}.{child.name}")

for name in ("jax", "jax.lax", "jax.nn", "jax.scipy", "jax.experimental.shard_map", "jax.experimental.pallas",
             "jax.experimental.custom_partitioning", "jax.experimental.sparse", "flax.nnx", "flax.linen", "optax"):
    load(name)

from jax.extend.core import Primitive
alive = [x for x in gc.get_objects() if isinstance(x, Primitive)]
from autoshard.spmdrules.reference.coverage import statuses
for primitive, known in statuses(alive).items():
    print(json.dumps([primitive.name, *([known.kind, known.reason, known.row] if known else [None, "", ""])]))
"""


@pytest.fixture(scope="module")
def every_primitive(run_python):
    """`(name, kind, reason, row)` of every primitive."""
    completed = run_python(LISTING)
    assert completed.returncode == 0, completed.stderr
    return [json.loads(line) for line in completed.stdout.splitlines()]


def count_by_value(values):
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts


def test_every_primitive_has_a_status(every_primitive):
    assert len(every_primitive) > 250
    kinds = count_by_value(kind for _, kind, _, _ in every_primitive)
    print(f"\n{len(every_primitive)} primitives of JAX {jax.__version__}: {kinds}")
    for reason, count in count_by_value(reason for _, kind, reason, _ in every_primitive if kind == "exempt").items():
        print(f"  exempt, {count}: {reason}")
    unknown = [name for name, kind, _, _ in every_primitive if kind is None]
    assert not unknown, f"no rule and no reason: {', '.join(unknown)}. Write a rule, or a row in coverage.py"


def test_few_have_no_rule(every_primitive):
    without = {name: reason for name, kind, reason, _ in every_primitive if kind == "no rule"}
    print("\n" + "\n".join(f"  {name}: {reason}" for name, reason in without.items()))
    assert len(NO_RULE) <= MAX_WITHOUT_RULE
    assert all(without.values()) and without.keys() <= NO_RULE.keys()


def test_no_row_is_stale(every_primitive):
    used = {row for _, _, _, row in every_primitive} | {
        name for name, kind, _, _ in every_primitive if kind == "structure"
    }
    stale = {*STRUCTURE, *NO_RULE, *EXEMPT} - used
    version = jax.__version_info__
    if version < (0, 11):
        assert stale == LATER
    elif version >= (0, 12):
        assert stale == EARLIER
    else:
        assert stale <= EARLIER | LATER


def test_rows_do_not_contradict_each_other():
    assert not STRUCTURE & NO_RULE.keys() and not (STRUCTURE | NO_RULE.keys()) & EXEMPT.keys()


def test_status_of_some_primitives():
    status_of = {p.name: status(p) for p in (lax.dot_general_p, lax.scan_p, lax.psum_p)}
    assert {name: s and s.kind for name, s in status_of.items()} == {
        "dot_general": "rule", "scan": "structure", "psum": "exempt",
    }  # fmt: skip
    unlisted = Primitive("unlisted")
    assert status(unlisted) is None and statuses([unlisted, lax.add_p])[unlisted] is None


def test_rules_that_no_test_runs_are_listed():
    rows = all_rows()
    run = {row.primitive for row in rows if not row.unchecked}
    assert {row.primitive for row in rows} - run <= UNRUN.keys()
    assert {name for name in UNRUN if exists(name)} & run <= {"with_memory_space_constraint"}  # a newer JAX runs it
