"""Finds the ranks of adapters and the latents of attention among a program's logical axes, by their operators."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from autoshard import _compat
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.spmdrules.ir.program import Op, Program

_IN_NORMS = {"mul", "div", "integer_pow", "square"}  # nonlinear operators in the norm of a vector


class ThinAxes:
    """The axes of activations that are smaller than what their weights make of them, and what is computed with them.

    Args:
        program: the program.
        axes: its logical axes.
        roles: their roles.
    """

    def __init__(self, program: Program, axes: LogicalAxes, roles: Roles):
        self.roles = roles
        self.weights: Counter[int] = Counter()  # axis -> the number of matrices that have it
        wide: set[int] = set()
        for v in program.inputs:
            own = [c for dim in axes.of_value[v] for c in dim if c not in axes.stacked]
            if roles.inputs.get(v) == "parameter" and len(own) > 1:
                total = math.prod(axes.sizes[c] for c in own)
                self.weights.update(own)
                wide |= {c for c in own if axes.sizes[c] ** 2 >= total}
        thin = self.weights.keys() - wide
        self.nonlinear: dict[int, set[str]] = {c: set() for c in thin}  # axis -> operators that are not linear in it
        self.made: set[int] = set()  # axes that a product with other activations has made
        self.contracted: set[int] = set()  # axes over which a product of the forward pass sums
        self.mixed: set[int] = set()  # axes of values that are combined with other activations
        self.summed: set[int] = set()  # axes that are summed over, as in a norm
        self.added: set[int] = set()  # axes of values that are added, as in a residual stream
        found = {dims: {c for dim in dims for c in dim} for dims in {*axes.of_value}}

        def of_activation(v: int) -> set[int] | None:
            own = found[axes.of_value[v]] if v >= 0 else set()
            return own if v in roles.row or not roles.rows.isdisjoint(own) else None

        has_thin = [bool(thin) and not thin.isdisjoint(found[dims]) for dims in axes.of_value]
        has_thin.append(False)  # of literals, which have the number -1
        for op in program.ops() if thin else ():
            if op.rule is not None and any([has_thin[v] for v in (*op.operands, *op.results)]):
                self._visit(op, [*map(of_activation, op.operands)], [*map(of_activation, op.results)])

    def adapter_ranks(self) -> list[int]:
        """The axes between the two weights of a product that replaces one larger weight, as in LoRA (arXiv:2106.09685).

        Nothing but these weights is between them: all that is computed with the axis is linear.
        """
        found = [c for c in self.roles.parallel if self.weights[c] > 1 and self.nonlinear.get(c) == set()]
        return [c for c in found if c in self.made & self.contracted and c not in self.mixed | self.summed]

    def latents(self) -> list[int]:
        """The axes of vectors from which queries, or keys and values, are computed (arXiv:2405.04434, section 2.1).

        Such a vector is only normalized before a weight makes it larger. It is no residual stream.
        """
        found = sorted(self.summed & self.contracted - self.added)
        return [c for c in found if self.nonlinear[c] <= _IN_NORMS]

    def _visit(self, op: Op, operands: Sequence[set[int] | None], results: Sequence[set[int] | None]) -> None:
        """Note what an operator computes, given the axes of its operands and results; None of those without rows."""
        assert op.rule is not None
        computed, used = ({*itertools.chain(*filter(None, arrays))} for arrays in (results, operands))
        gives_rows = any(dims is not None for dims in results)
        thin = self.nonlinear.keys() & (computed | used)
        linear = [{*group} for group in (*op.rule.linear, op.rule.moves)] if thin else []
        for c in thin:
            group = {n for n, dims in enumerate(operands) if dims is not None and c in dims}
            if op.name != "convert_element_type" and not any(group <= each for each in [*linear, set()]):
                self.nonlinear[c].add(op.name)
            if group and c in computed and any(dims is not None and c not in dims for dims in operands):
                self.mixed.add(c)
            is_lost = c not in computed and gives_rows
            if op.name == "dot_general" and not group:
                self.made.add(c)
            if op.name == "dot_general" and is_lost and not any(map(_compat.is_transposed, (op.eqn, *op.around))):
                self.contracted.add(c)
            if op.name == "reduce_sum" and is_lost:
                self.summed.add(c)
            if op.name == "add" and len(group) > 1:
                self.added.add(c)
