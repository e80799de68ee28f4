"""Reads a pretrained model onto the shards of a plan."""

from __future__ import annotations

import dataclasses
import operator
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from autoshard._shown import shown
from autoshard.ckpt.exchange.safetensors import Tensor
from autoshard.errors import AutoshardError, AutoshardWarning
from autoshard.models.decoder.config_changes import config_fields, with_changes
from autoshard.models.pretrained.copied import copied_patterns, warn_of_copies
from autoshard.models.pretrained.families import family_of
from autoshard.models.pretrained.families.family import Family
from autoshard.models.pretrained.folder import (
    CONFIG,
    HEAD,
    Folder,
    check_tensors,
    check_tied_head,
    float_dtype,
    stored_dtype,
)
from autoshard.models.pretrained.origin import Origin
from autoshard.models.pretrained.parameter_paths import as_tree, by_path
from autoshard.models.pretrained.quantized import Scheme
from autoshard.models.pretrained.quantized.kept_codes import (
    Kept,
    is_of_codes,
    kept_weights,
    parameters_of_codes,
    put_codes,
    with_codes,
    with_stored,
)
from autoshard.models.pretrained.shard_reader import Ranges, Shard, ShardReader
from autoshard.models.pretrained.tables import Source, sources_of
from autoshard.sharding.api.entry_points import plan as make_plan
from autoshard.sharding.api.plan import Plan

EMBEDDINGS = ("embed", "text/embed")  # the paths of the parameter that a tied head shares


def load_pretrained(
    path: Any,
    *,
    mesh: Any = None,
    target: Any = None,
    plan: Any = None,
    dtype: str | None = None,
    batch: tuple[int, int] | None = None,
    keep_codes: bool = False,
    **changes: Any,
) -> Any:
    """Load a model from a folder as it comes from the Hugging Face Hub, with each tensor read onto its shards.

    The model is planned for training on a batch of this shape. No process holds more than its own shards and one
    tensor. The plan is that of `plan_pretrained`; a step under `auto_shard` makes its own.

    Args:
        path: the folder, with `config.json` and safetensors files.
        mesh: the mesh, as in `plan`; by default all devices.
        target: the target of the plan, as in `plan`.
        plan: a strategy, or a `Plan` that `plan_pretrained` has made; by default the best one that is found.
        dtype: dtype of the parameters; by default each has the stored one.
        batch: rows and positions of the batch that is planned for; by default a row for each device, of at most 4096
            positions.
        keep_codes: whether the weights of a folder in fp8 or MXFP4 stay codes and scales on the devices, frozen.
            Products with few tokens multiply by the codes, and others decode their weight. A weight whose blocks are
            not ranges of its dimensions is decoded when it is read.
        **changes: fields of the model's config to change, for most families a `DecoderConfig`: `remat`, `scan_layers`,
            `attention`; and `compute_dtype`, the dtype of the computation.

    Returns:
        The model: a `Decoder`, or the class that its family names. `save_pretrained` writes it back.

    Raises:
        AutoshardError: the architecture or a feature of the config is not known; a file or a tensor is missing,
            unexpected, damaged or of another shape; the plan is one of another model. Nothing is loaded then.
    """
    folder, dtype = Folder.open(path), float_dtype(dtype, "load_pretrained")
    batch = batch_shape(batch, "load_pretrained")
    described = Described.of(folder, dtype, changes)
    tensors = folder.tensors()
    described = described.fitted(folder, tensors)
    warn_of_copies(described.family, folder, tensors, "save_pretrained")
    if keep_codes:
        described, tensors = described.keeping_codes(folder, tensors)
    made = plan if isinstance(plan, Plan) else described.plan(batch, mesh=mesh, target=target, plan=plan)
    return described.read(folder, tensors, described.shardings(made))


def read_values(
    folder: Folder,
    sources: Mapping[str, Source],
    tensors: Mapping[str, Tensor],
    dtypes: Mapping[str, Any],
    shardings: Mapping[str, Any],
) -> dict[str, jax.Array]:
    """Read parameters onto their shards, one after another.

    Args:
        folder: the folder, for messages.
        sources: path of each parameter -> its tensors.
        tensors: the folder's tensors by name.
        dtypes: the dtype of each parameter.
        shardings: the sharding of each parameter.
    """
    shards = {path: _shards(source, dtypes[path], shardings[path]) for path, source in sources.items()}
    found = {}
    with ShardReader(folder, tensors) as reader:
        for path, own in shards.items():
            arrays = []
            for shard, devices in own:
                values = reader.read(shard)
                arrays += [jax.device_put(values, device) for device in devices]
            shape = sources[path].shape
            found[path] = jax.make_array_from_single_device_arrays(shape, shardings[path], arrays)
    return found


def plan_pretrained(
    path: Any,
    *,
    batch: tuple[int, int] | None = None,
    dtype: str | None = None,
    keep_codes: bool = False,
    **options: Any,
) -> Plan:
    """Plan the training of a folder's model from its `config.json`, and with `keep_codes` also from its files' headers.

    Args:
        path: the folder.
        batch: rows and positions of the batch.
        dtype: dtype of the parameters; by default that of the config.
        keep_codes: plan for weights that stay codes and scales; see `load_pretrained`.
        **options: of `plan`, and fields of the model's config.

    Raises:
        AutoshardError: the architecture or a feature of the config is not known; with `keep_codes`, also if the files
            are wrong, or no weight can stay quantized.
    """
    folder = Folder.open(path)
    batch = batch_shape(batch, "plan_pretrained")
    family = family_of(folder.config, str(folder.path / CONFIG))
    with folder.values.naming():
        fields = config_fields(family.config(folder.values)) | {"compute_dtype"}
    changes = {name: options.pop(name) for name in list(options) if name in fields}
    described = Described.of(folder, float_dtype(dtype, "plan_pretrained"), changes)
    if keep_codes:
        tensors = folder.tensors()
        described, _ = described.fitted(folder, tensors).keeping_codes(folder, tensors)
    return described.plan(batch, **options)


def batch_shape(batch: Any, function: str) -> tuple[int, int] | None:
    """Return the rows and positions of a batch as integers; None if none are given.

    Raises:
        AutoshardError: they are not two whole numbers. The message begins with the function's name.
    """
    if batch is None:
        return None
    with suppress(TypeError):
        rows, positions = (operator.index(size) for size in batch) if len(batch) == 2 else (0, 0)
        if min(rows, positions) > 0:
            return rows, positions
    example = f"({batch}, 4096)" if isinstance(batch, int) and batch > 0 else "(8, 4096)"
    raise AutoshardError(
        f"{function}: batch is {batch!r:.60}; it must be two whole numbers of at least 1, rows and positions, such as "
        f"batch={example}"
    )


@shown
@dataclasses.dataclass(frozen=True)
class Described:
    """A folder's model, without its values.

    Attributes:
        cfg: the model's config.
        family: its family.
        origin: what `save_pretrained` needs to write it back.
        graph: its structure.
        shapes: path of each parameter -> its shape and dtype, before the files are looked at.
        sources: path of each parameter -> its tensors.
        dtype: the requested dtype of the parameters.
        kept: the weights that stay quantized. Their codes and scales are parameters in their place.
        scheme: the scheme in which these are quantized; None without such weights.
    """

    cfg: Any
    family: Family
    origin: Origin
    graph: Any
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    sources: Mapping[str, Source]
    dtype: str | None
    kept: Kept = dataclasses.field(default_factory=dict)
    scheme: Scheme | None = None

    @classmethod
    def of(cls, folder: Folder, dtype: str | None, changes: Mapping[str, Any]) -> Described:
        """Describe the model of a folder."""
        values = folder.values
        family = family_of(folder.config, str(folder.path / CONFIG))
        changes = dict(changes)
        kept = dtype or stored_dtype(folder.config)
        changes = {"param_dtype": kept, "dtype": changes.pop("compute_dtype", kept), **changes}
        with values.naming():
            cfg = with_changes(family.config(values), changes)
        origin = Origin.of(family, folder)
        if folder.text_of:
            warnings.warn(
                f"{str(folder.path)!r} is a {folder.text_of}: its text model alone is read, as a {origin.family}. The "
                "tensors of its towers are neither loaded nor saved, because these towers are not built",
                AutoshardWarning,
                stacklevel=3,
            )
        model: Any = nnx.eval_shape(lambda: family.model(cfg, rngs=nnx.Rngs(0)))
        model.origin = origin
        graph, state = nnx.split(model)
        shapes = by_path(nnx.to_pure_dict(state))
        sources = _sources(family, cfg, 0, shapes)
        return cls(cfg, family, origin, graph, shapes, sources, dtype)

    def fitted(self, folder: Folder, tensors: Mapping[str, Tensor]) -> Described:
        """Return the same with the spelling of names that fits most of the tensors, and the tensors to copy.

        Args:
            folder: the folder.
            tensors: the folder's tensors.

        Raises:
            AutoshardError: tensors are missing or unexpected, or have other shapes or dtypes; or the config says that
                the head is the embedding, but their values differ.
        """
        copied = copied_patterns(self.family, folder, tensors)

        def found(sources: Mapping[str, Source]) -> int:
            return sum(name in tensors for one in sources.values() for name in one.names.values())

        choices = [_sources(self.family, self.cfg, n, self.shapes) for n in range(1 + len(self.family.spellings))]
        best = max(range(len(choices)), key=lambda n: found(choices[n]))
        origin = self.origin.with_tensors(folder, best, copied)
        wanted = {name: one.tensor_shape for one in choices[best].values() for name in one.names.values()}
        patterns = [*self.family.ignored, *self.family.unneeded(self.cfg), *copied]
        ignored = {name for name in tensors if any(re.fullmatch(pattern, name) for pattern in patterns)}
        coded = {
            name for path, one in choices[best].items() if is_of_codes(path, self.shapes) for name in one.names.values()
        }
        check_tensors(tensors, wanted, ignored, coded, str(folder.path))
        if HEAD in ignored and (embedding := next((choices[best][e] for e in EMBEDDINGS if e in choices[best]), None)):
            check_tied_head(folder, tensors, embedding.names[()])
        if origin == self.origin:
            return self
        model = nnx.merge(self.graph, as_tree(self.shapes))
        model.origin = origin
        return dataclasses.replace(self, origin=origin, graph=nnx.graphdef(model), sources=choices[best])

    def keeping_codes(self, folder: Folder, tensors: Mapping[str, Tensor]) -> tuple[Described, Mapping[str, Tensor]]:
        """Return the same with weights that stay codes and scales, and the tensors to read.

        Args:
            folder: the folder.
            tensors: its tensors, with those that are quantized decoded.

        Raises:
            AutoshardError: no weight can stay quantized.
        """
        stored = folder.stored_tensors()
        kept, scheme = kept_weights(self.sources, stored, folder.scheme, str(folder.path)), folder.scheme
        assert scheme is not None
        return self.with_codes(kept, scheme), with_stored(tensors, stored, kept, scheme)

    def with_codes(self, kept: Kept, scheme: Scheme) -> Described:
        """Return the same with the codes and the scales of these weights, of this scheme, in their places."""
        model = nnx.merge(self.graph, as_tree(self.shapes))
        put_codes(model, kept, scheme)
        graph, state = nnx.split(model)
        sources = {path: one for path, one in self.sources.items() if path not in kept} | parameters_of_codes(kept)
        shapes = by_path(nnx.to_pure_dict(state))
        return dataclasses.replace(self, graph=graph, shapes=shapes, sources=sources, kept=kept, scheme=scheme)

    def abstract(self, tensors: Mapping[str, Tensor]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of the parameters, with the requested dtype or that of the files."""
        found = {}
        for path, leaf in self.shapes.items():
            dtypes = sorted({tensors[name].dtype for name in self.sources[path].names.values()})
            if self.dtype is None and len(dtypes) > 1:
                raise AutoshardError(f"{path} is made of tensors of {' and '.join(dtypes)}: give a dtype for all")
            dtype = None if is_of_codes(path, self.shapes) else self.dtype
            found[path] = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype or dtypes[0]))
        return found

    def shardings(self, plan: Plan) -> dict[str, Any]:
        """Return the sharding of each parameter in a plan of this model, by path.

        Raises:
            AutoshardError: the plan is one of another model.
        """
        found = by_path(plan.in_shardings()[0])
        planned = {path: tuple(leaf.shape) for path, leaf in zip(found, plan.inputs, strict=False)}
        wanted = {path: leaf.shape for path, leaf in self.shapes.items()}
        for path in {**wanted, **planned}:
            if planned.get(path) != wanted.get(path):
                has, needs = (str(list(one[path])) if path in one else "missing" for one in (planned, wanted))
                raise AutoshardError(
                    f"the plan is one of another model: {path} is {has} in the plan and {needs} in this model. Make it "
                    "by plan_pretrained with the same folder, fields such as scan_layers, and keep_codes"
                )
        return found

    def read(self, folder: Folder, tensors: Mapping[str, Tensor], shardings: Mapping[str, Any]) -> Any:
        """Return the model with its values, read onto the shards of each parameter."""
        dtypes = {name: leaf.dtype for name, leaf in self.abstract(tensors).items()}
        return self.model(read_values(folder, self.sources, tensors, dtypes, shardings))

    def plan(self, batch: tuple[int, int] | None, **options: Any) -> Plan:
        """Plan the gradient of the loss. Codes and scales are frozen."""

        def training(params: Any, batch: Mapping[str, Any]) -> Any:
            leaves = by_path(params)
            frozen = {path: leaf for path, leaf in leaves.items() if is_of_codes(path, leaves)}

            def loss(trained: Any) -> Any:
                total, count = nnx.merge(self.graph, as_tree({**frozen, **trained})).loss(batch)
                return total / count

            return jax.value_and_grad(loss)({path: leaf for path, leaf in leaves.items() if path not in frozen})

        training.__name__ = f"{self.family.name}_training"
        return make_plan(training, as_tree(self.shapes), self.family.batch(self.cfg, batch), **options)

    def model(self, values: Mapping[str, Any]) -> Any:
        """Return the model with these parameters, or their shapes, by path."""
        return nnx.merge(self.graph, as_tree(values))


def _sources(family: Family, cfg: Any, spelling: int, shapes: Mapping[str, Any]) -> dict[str, Source]:
    return sources_of(
        family.stacks(cfg),
        with_codes(family.spelled(cfg, spelling)),
        {path: leaf.shape for path, leaf in shapes.items()},
    )


def _shards(source: Source, dtype: Any, sharding: jax.sharding.Sharding) -> list[tuple[Shard, list[Any]]]:
    """Return the shards of a parameter that this process holds, and the devices of each. Each shard is read once."""
    devices: dict[Ranges, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(source.shape).items():
        ranges = tuple(i.indices(n)[:2] for i, n in zip(index or (), source.shape, strict=True))
        devices.setdefault(ranges, []).append(device)
    return [(Shard(source, ranges, dtype), found) for ranges, found in devices.items()]
