"""Finds the height, width and depth of images, and their channels, among a program's logical axes."""

from __future__ import annotations

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.program.operator_kinds import CONVOLUTION
from autoshard.spmdrules.ir.program import Program

_SPATIAL = {2: ("height", "width"), 3: ("depth", "height", "width")}  # the dimensions that a kernel slides along


def convolution_axes(program: Program, axes: LogicalAxes) -> tuple[dict[int, str], dict[int, str]]:
    """Find the axes of the inputs and results of convolutions.

    A convolution along one dimension is over a sequence, which is not among them.

    Args:
        program: the program.
        axes: its logical axes.

    Returns:
        Axis -> `height`, `width` or `depth`; and axis -> `channels`, for features. Both in the order of the program.
    """
    spatial: dict[int, str] = {}
    channels: dict[int, str] = {}
    windows: set[int] = set()  # in the gradient of a kernel, they are dimensions of the result
    for op in program.ops():
        if op.name != CONVOLUTION:
            continue
        numbers = op.eqn.params["dimension_numbers"]
        names = _SPATIAL.get(len(numbers.lhs_spec) - 2)
        if names is None:
            continue
        lhs, rhs, out = (axes.of_value[v] if v >= 0 else () for v in (*op.operands, *op.results))
        windows |= {c for d in numbers.rhs_spec[2:] if rhs for c in rhs[d]} - spatial.keys()
        for dims, (_, features, *along) in ((lhs, numbers.lhs_spec), (out, numbers.out_spec)):
            if dims:
                channels |= dict.fromkeys(dims[features], "channels")
                found = {c: name for d, name in zip(along, names, strict=True) for c in dims[d]}
                spatial |= {c: name for c, name in found.items() if c not in windows}
    return spatial, {c: name for c, name in channels.items() if c not in spatial}
