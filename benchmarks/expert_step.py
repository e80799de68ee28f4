"""A workload's train step under an expert's style: specs by parameter names, constraints by the letters of einsums."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from expert_plans import AXES, Spec, Style
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.kernels.block_choice import under_rules
from autoshard.kernels.grouped.call import grouped_call
from autoshard.kernels.grouped.matmul import grouped_product
from autoshard.kernels.planned_platform import Planned, planned_for
from autoshard.models import gpt, moe, wide_resnet
from autoshard.models.workloads import Workload
from autoshard.sharding.machines.kernel_rules import block_rules
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.custom_ops import operator
from autoshard.train.program.build import workload_step
from autoshard.train.step.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from autoshard.train.step.parameter_paths import path_name
from autoshard.train.step.train_state import Program, make_program
from autoshard.train.step.train_step import make_train_step

# The dimensions of each parameter, by the end of its path. A stack of layers has one more dimension in front.
_PARAMETERS: Sequence[tuple[str, tuple[str | None, ...]]] = (
    (r"experts/w_(up|gate)", ("experts", "width", "hidden")),
    (r"experts/w_down", ("experts", "hidden", "width")),
    (r"router", ("width", None)),
    (r"w_(up|gate)", ("width", "hidden")),
    (r"w_down", ("hidden", "width")),
    (r"w[qkv]", ("width", "heads", None)),
    (r"wo", ("heads", None, "width")),
    (r"b[qkv]", ("heads", None)),
    (r"b_(up|gate)", ("hidden",)),
    (r"embed", ("vocab", "width")),
    (r"position", (None, "width")),
    (r"patch", (None, None, None, "width")),
    (r"head", ("width", "vocab")),
    (r"conv3/kernel", (None, None, "hidden", "width")),
    (r"conv2/kernel", (None, None, "width", "hidden")),
    (r"(conv1|shortcut|stem)/kernel", (None, None, None, "width")),
)
_TENSOR = ("heads", "hidden", "vocab", "channels")


@dataclass(frozen=True)
class Annotator:
    """The specs of a style for a model.

    Attributes:
        style: the style.
        config: the config of one of autoshard's models; None for another program.
        parameters: the end of a parameter's path -> the names of its last dimensions.
    """

    style: Style
    config: Any
    parameters: Sequence[tuple[str, tuple[str | None, ...]]] = _PARAMETERS

    def spec(self, names: Sequence[str | None], shape: Sequence[int], *, stored: bool) -> Spec:
        """Return the spec of an array with these dimensions, as parameters are stored or as they are used."""
        found = []
        for name, size in zip(names, shape, strict=True):
            axes: tuple[str, ...] = ()
            if name in _TENSOR:
                axes = ("tensor",)
            elif name == "experts":
                axes = ("expert",)
            elif name == "width" and stored:
                axes = ("fsdp", "expert") if self.style.spread and "experts" not in names else ("fsdp",)
            elif name in ("batch", "tokens"):
                axes = self.style.batch
            elif name == "groups":
                axes = ("data", "fsdp")
            elif name == "rows":
                axes = ("data", "fsdp", "expert", "tensor")
            elif name == "stream":
                axes = ("tensor",) if self.style.sequence else ()
            axes = tuple(a for a in axes if self.style.ways((a,)) > 1)
            found.append(axes if axes and size % self.style.ways(axes) == 0 else None)
        return tuple(found)

    def parameter(self, path: str, shape: Sequence[int], *, stored: bool) -> Spec:
        """Return the spec of a parameter."""
        if self.style.today:
            return _largest(shape, self.style.sizes[1])
        names = self.names_of(path, len(shape))
        return (None,) * len(shape) if names is None else self.spec(names, shape, stored=stored)

    def names_of(self, path: str, rank: int) -> tuple[str | None, ...] | None:
        """Return the names of a parameter's dimensions; None if the table lacks it.

        A stack of parameters has one more dimension in front, without a name.
        """
        for pattern, names in self.parameters:
            if re.search(rf"(^|/)({pattern})$", path) and rank - len(names) in (0, 1):
                return (None,) * (rank - len(names)) + names
        return None

    def constrained(self, x: jax.Array, *names: str | None) -> jax.Array:
        """Constrain an activation and its gradient."""
        if self.style.today:
            return x
        spec = PartitionSpec(*self.spec(names, x.shape, stored=False))
        return lax.with_sharding_constraint(x, NamedSharding(self.style.mesh, spec))

    def gathered(self, weight: jax.Array, *names: str | None) -> jax.Array:
        """Gather a weight for its use, and reduce its gradient to where that is stored."""
        if self.style.today:
            return weight
        used = self.spec(names, weight.shape, stored=False)
        return _resharded(weight, used, self.spec(names, weight.shape, stored=self.style.zero > 1), self.style)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _resharded(x: jax.Array, forward: Spec, backward: Spec, style: Style) -> jax.Array:
    """Constrain a value to one spec and its gradient to another."""
    return lax.with_sharding_constraint(x, NamedSharding(style.mesh, PartitionSpec(*forward)))


def _resharded_forward(x, forward, backward, style):
    return _resharded(x, forward, backward, style), None


def _resharded_backward(forward, backward, style, _, gradient):
    return (lax.with_sharding_constraint(gradient, NamedSharding(style.mesh, PartitionSpec(*backward))),)


_resharded.defvjp(_resharded_forward, _resharded_backward)


def _largest(shape: Sequence[int], devices: int) -> Spec:
    dims = sorted((d for d, size in enumerate(shape) if size % devices == 0), key=lambda d: -shape[d])
    return tuple(("fsdp",) if dims and d == dims[0] else None for d in range(len(shape)))


class _Patched:
    """A module with some of its functions replaced."""

    def __init__(self, module: Any, **others: Any):
        self.__dict__.update(others, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Table:
    """A parameter that is gathered when it is read."""

    def __init__(self, param: Any, gathered: Callable[[jax.Array], jax.Array]):
        self.param, self.gathered = param, gathered

    def __getitem__(self, index: Any) -> jax.Array:
        assert index is Ellipsis
        return self.gathered(self.param[...])


_GPT = {"b": "batch", "e": "width", "h": "heads", "f": "hidden", "v": "vocab"}
_PLAIN, _BLOCKWISE = (importlib.import_module(f"autoshard.kernels.{name}_attention") for name in ("plain", "blockwise"))


@contextlib.contextmanager
def annotated(note: Annotator) -> Iterator[None]:
    """Annotate the models' einsums, lookups and convolutions inside this context."""
    embed_tokens = gpt.embed_tokens

    def gpt_einsum(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        letters, out = spec.split("->")[0].split(",")[1], spec.split("->")[1]
        y = jnp.einsum(spec, x, note.gathered(weight, *map(_GPT.get, letters)))
        if out == "bse":
            return note.constrained(y, "batch", "stream", None)
        return note.constrained(y, *(None if letter == "e" else _GPT.get(letter) for letter in out))

    def attention_einsum(spec: str, *operands: jax.Array, **options: Any) -> jax.Array:
        y, letters = jnp.einsum(spec, *operands, **options), spec.split("->")[1]
        sizes, tensor = dict(zip(letters, y.shape, strict=True)), note.style.ways(("tensor",))
        sharded = next((letter for letter in "kg" if sizes.get(letter, 1) % tensor == 0), None)
        if sharded is None:  # only key-value heads and groups together divide: left to the partitioner
            return y
        names = {"b": "batch", sharded: "heads"}
        return note.constrained(y, *map(names.get, letters))

    def moe_einsum(spec: str, *operands: jax.Array, **options: Any) -> jax.Array:
        if spec in ("bsd,de->bse", "gske,gskc->gsec"):
            return jnp.einsum(spec, *operands, **options)
        if spec == "gsec,gsd->egcd":
            return note.constrained(jnp.einsum(spec, *operands), "experts", "groups", None, None)
        if spec == "gsec,egcd->gsd":
            return note.constrained(jnp.einsum(spec, *operands), "tokens", None, None)
        assert spec == "egci,eio->egco", spec
        rows, weight = operands
        up = weight.shape[2] == note.config.expert_hidden
        names = ("experts", "width", "hidden") if up else ("experts", "hidden", "width")
        y = jnp.einsum(spec, rows, note.gathered(weight, *names))
        return note.constrained(y, "experts", "groups", None, "hidden" if up else None)

    def embedded(cfg: Any, embed: Any, position: Any, tokens: jax.Array) -> jax.Array:
        table = _Table(embed, lambda weight: note.gathered(weight, "vocab", "width"))
        return note.constrained(embed_tokens(cfg, table, position, tokens), "batch", "stream", None)  # pyright: ignore[reportArgumentType]

    def convolved(x: jax.Array, kernel: jax.Array, strides: Sequence[int], *args: Any, **options: Any) -> jax.Array:
        size, _, inputs, outputs = kernel.shape
        column = size == 3
        row = size == 1 and strides[0] == 1 and outputs * note.config.width_factor == inputs * 4
        names = (None, None, "width" if column else "hidden" if row else None, "hidden" if column else "width")
        y = lax.conv_general_dilated(x, note.gathered(kernel, *names), strides, *args, **options)
        return note.constrained(y, "batch", None, None, "hidden" if column else None)

    def by_sorting(self: moe.Experts, x: jax.Array, gates: jax.Array, chosen: jax.Array) -> jax.Array:
        return _sorted_on_shards(self, note, x, gates, chosen)

    patches = [
        mock.patch.object(gpt, "jnp", _Patched(jnp, einsum=gpt_einsum)),
        mock.patch.object(gpt, "embed_tokens", embedded),
        mock.patch.object(moe, "embed_tokens", embedded),
        mock.patch.object(_PLAIN, "jnp", _Patched(jnp, einsum=attention_einsum)),
        mock.patch.object(_BLOCKWISE, "jnp", _Patched(jnp, einsum=attention_einsum)),
        mock.patch.object(_BLOCKWISE, "einsum", partial(attention_einsum, preferred_element_type=jnp.float32)),
        mock.patch.object(operator, "apply", partial(applied_on_shards, note, operator.apply)),
        mock.patch.object(moe, "jnp", _Patched(jnp, einsum=moe_einsum)),
        mock.patch.object(wide_resnet, "lax", _Patched(lax, conv_general_dilated=convolved)),
        mock.patch.object(moe.Experts, "_by_sorting", by_sorting),
    ]
    with contextlib.ExitStack() as stack:
        for each in [] if note.style.today else patches:
            stack.enter_context(each)
        yield


def planned_blocks(target: str | None) -> contextlib.AbstractContextManager[None]:
    """Give attention kernels the block sizes that the planner chooses for a machine; None is no machine."""
    return contextlib.nullcontext() if target is None else under_rules(block_rules(None, target))


def applied_on_shards(
    note: Annotator,
    apply: Callable[..., tuple[jax.Array, ...]],
    primitive: Any,
    args: Sequence[jax.Array],
    **params: Any,
) -> tuple[jax.Array, ...]:
    """Run an attention kernel on shards of the batch and the heads. XLA does not partition it."""
    if not primitive.name.startswith("splash_attention"):
        return apply(primitive, args, **params)
    rule = Rule.parse(params["text"], *args)
    tensor = note.style.ways(("tensor",))
    heads = next((name for name in ("h", "g") if (rule.factor(name).size or 1) % tensor == 0), None)
    if heads is None:
        raise ValueError(f"{note.style.name}: neither key heads nor query groups divide by {tensor}")
    names = {"b": "batch", heads: "heads"}
    specs = [
        note.spec([names.get(dim[0]) if len(dim) == 1 else None for dim in dims], x.shape, stored=False)
        for dims, x in zip(rule.operands, args, strict=True)
    ]
    shards = [tuple(() if axes is None else axes for axes in spec) for spec in specs]
    return tuple(operator.run_sharded(params, note.style.mesh, shards, [None] * len(rule.results), *args))


def _sorted_on_shards(
    experts: moe.Experts, note: Annotator, x: jax.Array, gates: jax.Array, chosen: jax.Array
) -> jax.Array:
    """Run dropless experts: each device sorts its own tokens, and has a shard of every expert's hidden size."""
    up, down = ("experts", "width", "hidden"), ("experts", "hidden", "width")
    named = {"w_up": up, "w_gate": up, "w_down": down}
    given = {name: getattr(experts, name) for name in named if getattr(experts, name) is not None}
    weights = {name: note.gathered(value[...].astype(x.dtype), *named[name]) for name, value in given.items()}
    specs = {name: PartitionSpec(*note.spec(named[name], w.shape, stored=False)) for name, w in weights.items()}
    rows = PartitionSpec(*note.spec(("batch", None, None), x.shape, stored=False))

    call, own = grouped_call(x.dtype), jnp.arange(experts.cfg.experts, dtype=jnp.int32)

    def body(weights: Mapping[str, jax.Array], x: jax.Array, gates: jax.Array, chosen: jax.Array) -> jax.Array:
        top_k, width = chosen.shape[2], x.shape[2]
        choices = chosen.reshape(-1)
        order = jnp.argsort(choices)
        sizes = jnp.sum(choices[:, None] == jnp.arange(experts.cfg.experts)[None], axis=0, dtype=jnp.int32)
        taken = x.reshape(-1, width)[order // top_k]
        hidden = grouped_product(call, taken, weights["w_up"], sizes, own)
        gate = weights.get("w_gate")
        if gate is None:
            hidden = jax.nn.gelu(hidden)
        else:
            hidden = jax.nn.silu(grouped_product(call, taken, gate, sizes, own)) * hidden
        made = grouped_product(call, hidden, weights["w_down"], sizes, own)
        back = jnp.zeros_like(made).at[order].set(made, unique_indices=True)
        weighted = back.reshape(-1, top_k, width) * gates.reshape(-1, top_k, 1).astype(x.dtype)
        y = jnp.sum(weighted, axis=1).reshape(x.shape)
        return lax.psum(y, "tensor") if note.style.ways(("tensor",)) > 1 else y

    shards = jax.shard_map(
        body, mesh=note.style.mesh, in_specs=(specs, rows, rows, rows), out_specs=rows, check_vma=False
    )
    return note.constrained(shards(weights, x, gates, chosen), "batch", "stream", None)


@dataclass(frozen=True)
class Annotated(Program):
    """A program whose gradients are stored where their consumers need them."""

    note: Annotator | None = field(default=None)

    def model(self, params: Any, frozen: Any, variables: Any, key: Any) -> Any:
        """Build the model. Gradients of its parameters are reduced to where the style stores them."""
        note = self.note
        assert note is not None

        def resharded(path: Any, leaf: jax.Array) -> jax.Array:
            stored = note.parameter(path_name(path), leaf.shape, stored=note.style.zero == 3)
            return _resharded(
                leaf, stored, note.parameter(path_name(path), leaf.shape, stored=note.style.zero > 1), note.style
            )

        if not note.style.today:
            params = jax.tree_util.tree_map_with_path(resharded, params)
        return super().model(params, frozen, variables, key)


@dataclass(frozen=True)
class Expert:
    """A hand-written step: a function of flat arguments, with their shapes and shardings.

    `avals` and `in_shardings` are those of the arguments' leaves, `out_shardings` those of the results' leaves, and
    `donated` the numbers of the state's leaves.
    """

    fn: Callable[..., list[Any]] = field(repr=False)
    avals: list[Any] = field(repr=False)
    in_shardings: list[NamedSharding] = field(repr=False)
    out_shardings: list[NamedSharding] = field(repr=False)
    donated: tuple[int, ...] = field(repr=False)
    mesh: Mapping[str, int] = field(default_factory=dict)


def expert_step(work: Workload, style: Style, microbatches: int = 1, machine: Planned | str = "cpu") -> Expert:
    """Make the workload's train step, that of `autoshard.train.program.build.workload_step`, under a style.

    It has the kernels of the machine, or of the platform. Common practice has none: XLA does not partition them.
    """
    note, settings = Annotator(style, work.config), OptimizerConfig()
    plain = make_program(work.build, make_optimizer(settings, 1000))
    program = Annotated(**{name: getattr(plain, name) for name in Program.__dataclass_fields__}, note=note)
    step = make_train_step(program, learning_rate_schedule(settings, 1000), microbatches)
    state, batch = program.abstract_state(), work.batch()
    leaves, tree = jax.tree_util.tree_flatten_with_path((state, batch))

    def spec_of(path: Any, leaf: Any) -> Spec:
        text = path_name(path)
        if text.startswith("1/"):
            return (style.batch,) if style.ways(style.batch) > 1 else ()
        return note.parameter(text, leaf.shape, stored=style.zero == 3 or "opt_state" in text)

    def run(*flat: Any) -> list[Any]:
        with annotated(note), planned_for("cpu" if style.today else machine):
            return jax.tree.leaves(step(*jax.tree.unflatten(tree, flat)))

    shardings = [NamedSharding(style.mesh, PartitionSpec(*spec_of(*each))) for each in leaves]
    count = len(jax.tree.leaves(state))
    plain_step, *_ = workload_step(work, microbatches)
    metrics = len(jax.tree.leaves(jax.eval_shape(plain_step, state, batch))) - count
    replicated = [NamedSharding(style.mesh, PartitionSpec())] * metrics
    sizes = dict(zip(AXES, style.sizes, strict=True))
    results = shardings[:count] + replicated
    return Expert(run, [leaf for _, leaf in leaves], shardings, results, tuple(range(count)), sizes)
