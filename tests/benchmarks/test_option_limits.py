"""The programs and rows of the benchmark of limits and gathers, without a compiler."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import option_limits
import pytest

from autoshard.sharding.machines.kernel_rules import VMEM_OPTION


def audit(us, exposed_us):
    kinds = {"all-gather": exposed_us, "reduce-scatter": 1.0}
    collectives = [SimpleNamespace(kind=kind, wire_us=4.0, exposed_us=exposed) for kind, exposed in kinds.items()]
    return SimpleNamespace(
        kind="ok", message="", step_time_us=us, collectives=collectives, seconds=2.0, cached=False, versions={}
    )


@pytest.fixture
def compiled(monkeypatch):
    """Records the options of each program; time and exposed part follow from them."""
    calls = []

    def under(options):
        calls.append(dict(options))
        several = sum(options.get(option_limits._GATHER.format(each)) == "true" for each in ("2d_", "3d_"))
        return audit(100.0 - int(options.get(VMEM_OPTION, 0)) / 1024, 4.0 - several)

    monkeypatch.setattr(option_limits, "_compiled", lambda step, target, words: under)
    return calls


def test_products_are_compared_with_the_compilers_own_limit(compiled):
    rows = [*option_limits.products("v5e", [(2048, 8192)])]
    assert [VMEM_OPTION in options for options in compiled] == [False, True, True]
    assert [(row.us, row.base_us) for row in rows] == [(68, 100), (4, 100)]
    assert str(rows[0]).startswith("v5e:1x1 MLP 2048x8192 32768 KiB: 0.680")


def test_gathers_are_compared_with_those_over_one_dimension(compiled):
    rows = [*option_limits.gathers("v5p:2x2x2")]
    names = [option_limits._GATHER.format(each) for each in ("", "2d_", "3d_")]
    assert [[options[name] for name in names] for options in compiled] == [
        ["true", "false", "false"], ["true", "true", "false"], ["true", "true", "true"]
    ]  # fmt: skip
    assert [(row.exposed, row.base_exposed) for row in rows] == [(0.75, 1.0), (0.5, 1.0)]


def test_kept_gathers_are_compared_with_a_program_without_the_option(compiled):
    (row,) = option_limits.kept("v5p:4x4x4")
    assert [options.get(option_limits.KEEP_GATHERS) for options in compiled] == [None, "true"]
    assert compiled[1].items() - compiled[0].items() == {(option_limits.KEEP_GATHERS, "true")}
    assert (row.option, row.program) == ("kept", "layers, fsdp:64")


def test_stacks_in_host_memory_are_compared_with_a_program_without_the_option(compiled):
    (row,) = option_limits.stacks("tpu7x:2x2x1")
    assert [options.get(option_limits.TILES) for options in compiled] == [None, "false"]
    assert compiled[1].items() - compiled[0].items() == {(option_limits.TILES, "false")}
    assert (row.option, row.program) == ("tiles of 8 rows", "stacks in host memory, fsdp:8")


def test_an_unknown_machine_is_an_error_that_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        option_limits.main(["stacks", "v5e:2x4"])
    assert "stacks has no v5e:2x4; choose from tpu7x:2x2x1" in capsys.readouterr().err


def test_the_mlp_computes_its_gradients(monkeypatch):
    monkeypatch.setattr(option_limits, "SIZES", {(4, 8): True, (4, 6): False})
    for sizes, weights in (((4, 8), 3), ((4, 6), 2)):
        run, *shapes = option_limits.mlp_step(*sizes, rows=16)
        out, (of_weights, of_x) = jax.eval_shape(run, *shapes)
        assert out.shape == of_x.shape == (16, 4) and out.dtype == jnp.bfloat16 and len(of_weights) == weights
