"""Evaluates a jaxpr again and moves values to the host and back, as `Edits` say. Without edits it inlines calls.

A kept value goes to the host where it is made, and comes back before the first equation of the backward pass that takes
it. Without a barrier, XLA could bring it back at the beginning of the backward pass. So a barrier delays it: it comes
back after the backward pass has reached the equation that takes the kept value before it, one value ahead of its use.
Forward equations take the value on the device.

A stack goes to the host slice by slice in the body of the scan that makes it, and comes back slice by slice in the body
of the scan that takes it, so the device holds one slice at a time. Other equations that take a stack get all of it at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from autoshard import _compat
from autoshard.sharding.offload.edits import Edits, call_of
from autoshard.sharding.offload.update_loops import UpdateLoop, evaluate_slice

_NO_EDITS = Edits()
_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def replay(closed: Any, edits: Edits = _NO_EDITS) -> Callable[..., list[Any]]:
    """Return a closed jaxpr with edits as a function from its flat inputs to its flat results."""
    return lambda *args: _Replay(closed, edits).run(args)


class _Replay:
    """One evaluation of one jaxpr.

    Attributes:
        here: variable -> its value in device memory.
        host: canonical variable -> its value in host memory.
        back: canonical variable -> its value after it came back.
        computed: variables that the backward pass made.
        reached: the value for which the next transfer back waits: one that the backward pass had computed when it last
            took a kept value. Empty before that.
    """

    def __init__(self, closed: Any, edits: Edits):
        self.jaxpr, self.constants, self.edits = _compat.open_jaxpr(closed), _compat.constants(closed), edits
        self.here: dict[Any, Any] = {}
        self.host: dict[Any, Any] = {}
        self.back: dict[Any, Any] = {}
        self.computed: set[Any] = set()
        self.reached: list[Any] = []
        self.is_waiting = False  # whether the current equation brought a value back

    def run(self, args: Sequence[Any]) -> list[Any]:
        jaxpr, edits = self.jaxpr, self.edits
        self.here.update(zip(jaxpr.constvars, self.constants, strict=True))
        for var, value in zip(jaxpr.invars, args, strict=True):
            (self.host if var in edits.inputs else self.here)[var] = value
        eqns = jaxpr.eqns if edits.order is None else edits.order
        in_loops = {var for eqn in eqns if isinstance(eqn, UpdateLoop) for var in eqn.stacked}
        for var in [v for v in jaxpr.invars if v in edits.inputs and v not in in_loops]:
            self.here[var] = jax.device_put(self.host.pop(var), _DEVICE)
        for eqn in eqns:
            if isinstance(eqn, UpdateLoop):
                self.update(eqn)
                continue
            with _compat.source_of(eqn):
                self.equation(eqn)
                for var in eqn.outvars:
                    if var in edits.kept:
                        self.host[var] = jax.device_put(self.here[var], _HOST)
        return [self.result(atom, n in edits.outputs) for n, atom in enumerate(jaxpr.outvars)]

    def result(self, atom: Any, on_host: bool) -> Any:
        if on_host and not isinstance(atom, _compat.Literal) and atom in self.host:
            return self.host[atom]
        value = self.read(atom)
        return jax.device_put(value, _HOST) if on_host else value

    def update(self, loop: UpdateLoop) -> None:
        """Evaluate the update of a stacked parameter. The optimizer's state moves slice by slice."""
        moved = {self.jaxpr.outvars[n] for n in self.edits.outputs}
        scalars = {var: self.read(var) for var in loop.scalars}
        on_host = [var in self.host for var in loop.stacked]
        stacks = [self.host[v] if there else self.read(v) for v, there in zip(loop.stacked, on_host, strict=True)]

        def step(carry: None, slices: list[Any]) -> tuple[None, list[Any]]:
            values = [jax.device_put(x, _DEVICE) if there else x for x, there in zip(slices, on_host, strict=True)]
            env = {**scalars, **dict(zip(loop.stacked, values, strict=True))}
            evaluate_slice(loop, env)
            return carry, [jax.device_put(env[v], _HOST) if v in moved else env[v] for v in loop.results]

        _, results = lax.scan(step, None, stacks, length=loop.length)
        for var, value in zip(loop.results, results, strict=True):
            (self.host if var in moved else self.here)[var] = value

    def read(self, atom: Any, backward: bool = False) -> Any:
        """The value of an operand in device memory; for the backward pass, the one that came back."""
        if isinstance(atom, _compat.Literal):
            return atom.val
        key = self.edits.of(atom)
        if key in self.host and (backward or atom not in self.here):
            if key not in self.back:
                self.back[key] = _brought(self.host[key], self.reached)
                self.is_waiting = True
            return self.back[key]
        return self.here[atom]

    def equation(self, eqn: Any) -> None:
        backward, self.is_waiting = _compat.is_transposed(eqn), False
        if eqn.primitive.name == "scan":
            self.scan(eqn, backward)
        else:
            self.other(eqn, backward)
        if backward:
            self.computed.update(eqn.outvars)
            if self.is_waiting:
                taken = [a for a in eqn.invars if not isinstance(a, _compat.Literal) and a in self.computed]
                self.reached = [self.here[var] for var in taken if var in self.here][:1] or self.reached

    def other(self, eqn: Any, backward: bool) -> None:
        """Evaluate an equation that is not a scan."""
        inner = call_of(eqn)
        args = [self.read(atom, backward) for atom in eqn.invars]
        if inner is not None:
            results = replay(inner)(*args)
        elif eqn.primitive.name == "while":
            results = self.loop(eqn, args)
        elif eqn.primitive.name == "cond":
            branches = [self.inner(eqn, n, branch) for n, branch in enumerate(eqn.params["branches"])]
            results = lax.switch(args[0], branches, *args[1:])
        else:
            results = _compat.bind(eqn, eqn.params, *args)
        self.here.update(zip(eqn.outvars, results, strict=True))

    def inner(self, eqn: Any, number: int, closed: Any) -> Callable[..., list[Any]]:
        """Return a jaxpr within an equation, with its edits, as a function."""
        return replay(closed, self.edits.inner.get((id(eqn), number), _NO_EDITS))

    def scan(self, eqn: Any, backward: bool) -> None:
        """Evaluate a scan. Slices of its stacks move in its body."""
        params = eqn.params
        n_consts, n_carry = _compat.scan_arity(params)
        first = n_consts + n_carry
        fixed = [self.read(atom, backward) for atom in eqn.invars[:first]]
        consts, init = fixed[:n_consts], fixed[n_consts:]
        # Stacks in host memory enter the loop once each, even if several operands have the same value.
        keys = [self.stack(atom, backward) for atom in eqn.invars[first:]]
        on_host = list(dict.fromkeys(key for key in keys if key is not None))
        rest = [self.read(atom, backward) for atom, key in zip(eqn.invars[first:], keys, strict=True) if key is None]
        made = self.edits.stacks.get(id(eqn), frozenset())
        body = self.inner(eqn, 0, params["jaxpr"])
        edits = self.edits.inner.get((id(eqn), 0), _NO_EDITS)
        outvars = _compat.open_jaxpr(params["jaxpr"]).outvars[n_carry:]
        sources = {k: edits.of(outvars[k]) for k in sorted(made)}
        firsts = [k for n, k in enumerate(sources) if sources[k] not in [*sources.values()][:n]]

        def step(carry: list[Any], x: tuple[list[Any], list[Any]]) -> tuple[list[Any], Any]:
            moved = dict(zip(on_host, (jax.device_put(each, _DEVICE) for each in x[1]), strict=True))
            others = iter(x[0])
            slices = [next(others) if key is None else moved[key] for key in keys]
            out = body(*consts, *carry, *slices)
            ys = out[n_carry:]
            kept = [y for k, y in enumerate(ys) if k not in made]
            return out[:n_carry], (kept, [jax.device_put(ys[k], _HOST) for k in firsts])

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, (kept, stacks) = lax.scan(step, init, (rest, [self.host[key] for key in on_host]), **options)
        others = iter(kept)
        for var, value in zip(eqn.outvars, carry, strict=False):
            self.here[var] = value
        for k, var in enumerate(eqn.outvars[n_carry:]):
            if k in made:
                self.host[var] = stacks[[sources[f] for f in firsts].index(sources[k])]
            else:
                self.here[var] = next(others)

    def stack(self, atom: Any, backward: bool) -> Any:
        """The variable of a stack that is in host memory only; None for other operands.

        Results of a scan with the same value share one stack. The first of their variables represents it.
        """
        if isinstance(atom, _compat.Literal) or not backward or atom in self.here or atom not in self.host:
            return None
        return next(var for var, value in self.host.items() if value is self.host[atom])

    def loop(self, eqn: Any, args: list[Any]) -> list[Any]:
        """Evaluate a while loop: the primitive is bound, because under `vmap` each row has a condition of its own."""
        params = eqn.params
        body = params["body_jaxpr"]
        inputs = map(_compat.shape_dtype_of, _compat.open_jaxpr(body).invars)
        changed, consts = _compat.split_constants(jax.make_jaxpr(self.inner(eqn, 0, body))(*inputs))
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"] + len(consts)
        operands = [*args[:n_cond], *consts, *args[n_cond:]]
        return _compat.bind(
            eqn, {**params, "body_jaxpr": _compat.close(changed, []), "body_nconsts": n_body}, *operands
        )


def _brought(value: Any, waits: Sequence[Any]) -> Any:
    """Move a value from the host to device memory, after other values are computed."""
    if waits:
        value = lax.optimization_barrier((value, *waits))[0]
    return jax.device_put(value, _DEVICE)


def inlined(closed: Any) -> Any:
    """Return a closed jaxpr without calls that only group equations. Bodies of loops and branches change too."""
    return jax.make_jaxpr(replay(closed))(*map(_compat.shape_dtype_of, _compat.open_jaxpr(closed).invars))
