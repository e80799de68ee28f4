"""The lines of a report on the collectives of each module."""

from autoshard.sharding.overlap.module_times import compiled_times, module_lines


def test_collectives_of_one_module_are_added_up():
    times = compiled_times([
        ("jit(f)/overlap[0/*/up:gather]/sharding_constraint", 3.0, 1.0),
        ("jit(f)/overlap[0/*/up:activations]/overlap[0/*/up:gather]/all_gather", 4.0, 0.0),
        ("jit(f)/transpose/overlap[0/*/up:reduce]/dot_general", 5.0, 5.0),
        ("jit(f)/dot_general", 7.0, 7.0),
    ])  # fmt: skip
    assert times == {"0/*/up": {"gather": (7.0, 1.0), "reduce": (5.0, 5.0)}}


def test_lines():
    times = {"0/a": {"gather": (3e3, 1e3)}, "0/b": {"gather": (2e3, 2e3), "reduce": (1e3, 0.0)}}
    assert module_lines(times, "estimated") == [
        "collectives by module:",
        "  estimated  gather: hidden  exposed  reduce: hidden  exposed",
        "  0/b                  0 us  2.00 ms         1.00 ms     0 us",
        "  0/a               2.00 ms  1.00 ms",
    ]
    assert module_lines({}, "estimated") == []
