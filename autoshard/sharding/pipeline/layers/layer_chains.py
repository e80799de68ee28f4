"""Computes what layers carry besides their activations once a step, before the pipeline.

A carry of the scan over the layers that does not depend on the batch is a chain: a random key that each layer splits, a
counter, a scale, a sum over the weights. Every microbatch has the same chain. So a loop of its own computes the value
that enters each layer, and the layers take these values as slices. The stages then pass on activations alone.

    x, key = carry                        keys = chain(key)
    key, sub = split(key)          ->     _, sub = split(keys[layer])
    carry = f(x, w[layer], sub), key      carry = f(x, w[layer], sub)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard import _compat
from autoshard.sharding.microbatches.flow import Flow
from autoshard.sharding.microbatches.states import Whole

Env = dict[Any, Any]


def split_chains(closed: Any, flow: Flow) -> Any | None:
    """Return a step whose scans carry only what depends on the batch; None if they do so already.

    Args:
        closed: the step's closed jaxpr, with calls inlined.
        flow: for each of its values, the part that one microbatch has.
    """
    jaxpr = _compat.open_jaxpr(closed)
    chains = {
        id(eqn): chain
        for eqn, step in zip(jaxpr.eqns, flow.steps, strict=True)
        if eqn.primitive.name == "scan" and step.phase == "each" and (chain := _chain_of(eqn, step.inner[0]))
    }
    if not chains:
        return None

    def run(*args: Any) -> list[Any]:
        env = dict(zip(jaxpr.constvars, _compat.constants(closed), strict=True))
        env |= zip(jaxpr.invars, args, strict=True)
        for eqn in jaxpr.eqns:
            operands = [_read(env, a) for a in eqn.invars]
            with _compat.source_of(eqn):
                chain = chains.get(id(eqn))
                results = chain.run(operands) if chain else _compat.bind(eqn, eqn.params, *operands)
            env |= zip(eqn.outvars, results, strict=True)
        return [_read(env, a) for a in jaxpr.outvars]

    return _compat.dce(jax.make_jaxpr(run)(*map(_compat.shape_dtype_of, jaxpr.invars)))


def _chain_of(eqn: Any, body: Flow) -> _Chain | None:
    """The chains of a scan; None if it has none, or carries nothing else."""
    consts, carries = _compat.scan_arity(eqn.params)
    whole = [n for n, var in enumerate(body.jaxpr.invars) if isinstance(body.states[var], Whole)]
    places = [n - consts for n in whole if consts <= n < consts + carries]
    if not places or len(places) == carries:
        return None
    chain = _Chain(eqn, places)
    return chain if chain.taken.issubset(whole) else None


class _Chain:
    """The chains of one scan.

    Args:
        eqn: the scan.
        places: the places of the chains in its carry.
    """

    def __init__(self, eqn: Any, places: Sequence[int]):
        self.eqn, self.places = eqn, places
        self.consts, self.carries = _compat.scan_arity(eqn.params)
        self.first = self.consts + self.carries  # the position of the first slice among the inputs
        body = eqn.params["jaxpr"]
        results = _compat.open_jaxpr(body).outvars
        self.others = [n for n in range(self.carries) if n not in {*places}]
        self.own = _with_results(body, [results[n] for n in places])
        self.rest = _with_results(body, [*(results[n] for n in self.others), *results[self.carries :]])
        self.jaxpr = _compat.open_jaxpr(self.own)
        self.taken = _taken(self.jaxpr)
        rest = _taken(_compat.open_jaxpr(self.rest))
        self.kept = [n for n in places if self.consts + n in rest]
        # What a chain takes of each layer is computed for all layers at once, as far as it does not need the chain.
        slices = self.jaxpr.invars[self.first :]
        on_layer, on_chain = self._dependents(slices), self._dependents(self.jaxpr.invars[self.consts : self.first])
        self.ahead = [e for e in self.jaxpr.eqns if on_layer.issuperset(e.outvars) and on_chain.isdisjoint(e.outvars)]
        written = {*map(id, self.ahead)}
        self.in_turn = [e for e in self.jaxpr.eqns if id(e) not in written]
        made = {*slices, *(v for e in self.ahead for v in e.outvars)}
        taken = [*(a for e in self.in_turn for a in e.invars), *self.jaxpr.outvars]
        self.fed = [*dict.fromkeys(a for a in taken if not isinstance(a, _compat.Literal) and a in made)]

    def _dependents(self, variables: Iterable[Any]) -> set[Any]:
        """Some variables, and all that the chain computes from them."""
        found = {*variables}
        for eqn in self.jaxpr.eqns:
            if found.intersection(a for a in eqn.invars if not isinstance(a, _compat.Literal)):
                found |= {*eqn.outvars}
        return found

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Return the results of the scan."""
        consts, params = [*operands[: self.consts]], self.eqn.params
        carry = [_typed(x, v) for x, v in zip(operands[self.consts :], self.jaxpr.invars[self.consts :], strict=False)]
        carry, slices = carry[: self.carries], [*operands[self.first :]]
        ends, entered = self.run_alone(consts, carry, slices)
        body = _compat.jaxpr_as_function(self.rest)

        def layer(others: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            known = dict(zip((*self.others, *self.kept), (*others, *xs[len(slices) :]), strict=True))
            of_layer = [known.get(n, x) for n, x in enumerate(carry)]  # the body does not take the others
            made = body(*consts, *of_layer, *xs[: len(slices)])
            return made[: len(others)], made[len(others) :]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carried, stacked = lax.scan(layer, [carry[n] for n in self.others], [*slices, *entered], **options)
        by_place = dict(zip((*self.places, *self.others), (*ends, *carried), strict=True))
        return [*(by_place[n] for n in range(self.carries)), *stacked]

    def run_alone(self, consts: list[Any], carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        """Run the chains alone. Return their ends, and the values `[L, ...]` of those that the layers take.

        The loop reads and writes arrays of all layers by the layer's number. If it took slices of them, they would be
        whole on each device, as would be all arrays whose layers are on stages.
        """
        length, reverse = self.eqn.params["length"], self.eqn.params["reverse"]
        known = dict(zip(self.jaxpr.constvars, _compat.constants(self.own), strict=True))
        known |= zip(self.jaxpr.invars, (*consts, *carry), strict=False)
        of_layers = dict(zip(self.jaxpr.invars[self.first :], slices, strict=True))
        if any(v not in of_layers for v in self.fed):

            def ahead(_: tuple[()], xs: list[Any]) -> tuple[tuple[()], list[Any]]:
                env = {**known, **dict(zip(self.jaxpr.invars[self.first :], xs, strict=True))}
                _evaluate(self.ahead, env)
                return (), [env[v] for v in self.fed]

            of_layers = dict(zip(self.fed, lax.scan(ahead, (), slices, length=length)[1], strict=True))
        fed = {v: _words(of_layers[v]) for v in self.fed}
        words = {n: _words(carry[n]) for n in self.kept}
        empty = [jnp.zeros((length, *x.shape), x.dtype) for x in words.values()]

        def step(state: tuple[list[Any], list[Any]], n: Any) -> tuple[tuple[list[Any], list[Any]], None]:
            values, entered = dict(zip(self.places, state[0], strict=True)), state[1]
            kept = (_words(values[k]) for k in self.kept)
            entered = [lax.dynamic_update_index_in_dim(a, x, n, 0) for a, x in zip(entered, kept, strict=True)]
            env = known | {self.jaxpr.invars[self.consts + k]: x for k, x in values.items()}
            env |= {v: _keys(lax.dynamic_index_in_dim(x, n, 0, False), of_layers[v]) for v, x in fed.items()}
            _evaluate(self.in_turn, env)
            return ([_read(env, a) for a in self.jaxpr.outvars], entered), None

        state = [carry[n] for n in self.places], empty
        (ends, entered), _ = lax.scan(step, state, jnp.arange(length), reverse=reverse)
        return ends, [_keys(x, carry[n]) for n, x in zip(self.kept, entered, strict=True)]


def _with_results(body: Any, results: list[Any]) -> Any:
    """A closed jaxpr with other results, without what these do not need."""
    return _compat.dce(_compat.with_equations(body, _compat.open_jaxpr(body).eqns, outvars=results))


def _taken(jaxpr: Any) -> set[int]:
    """The positions of the inputs that a jaxpr uses."""
    used = {a for atoms in (*(e.invars for e in jaxpr.eqns), jaxpr.outvars) for a in atoms
            if not isinstance(a, _compat.Literal)}  # fmt: skip
    return {n for n, var in enumerate(jaxpr.invars) if var in used}


def _words(x: Any) -> Any:
    """The words of random keys; other values as they are."""
    return jax.random.key_data(x) if _compat.is_extended(x.dtype) else x


def _keys(words: Any, like: Any) -> Any:
    """Random keys with these words if the other value has random keys, else the values as they are."""
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like)) if _compat.is_extended(like.dtype) else words


def _typed(x: Any, var: Any) -> Any:
    """A value in the type of a variable, because literals have none."""
    return x if _compat.is_extended(var.aval.dtype) else jnp.asarray(x, var.aval.dtype)


def _evaluate(eqns: Iterable[Any], env: Env) -> None:
    for eqn in eqns:
        with _compat.source_of(eqn):
            results = _compat.bind(eqn, eqn.params, *(_read(env, a) for a in eqn.invars))
        env |= zip(eqn.outvars, results, strict=True)


def _read(env: Env, atom: Any) -> Any:
    return atom.val if isinstance(atom, _compat.Literal) else env[atom]
