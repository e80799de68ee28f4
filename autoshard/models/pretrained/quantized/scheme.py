"""What a scheme of quantization does: it reads tensors of codes and scales as plain ones, and writes these back."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from autoshard._columns import listing
from autoshard.ckpt.exchange.export import cast_values
from autoshard.ckpt.exchange.safetensors import Tensor
from autoshard.errors import AutoshardError
from autoshard.models.pretrained.layouts import Layout
from autoshard.models.pretrained.tables import Source

Index = tuple[slice, ...]
PLAIN = "bfloat16"
"""The dtype in which quantized tensors are read unless another one is given."""


class Scheme(ABC):
    """A scheme of quantization. Its subclasses define the abstract methods.

    A plain tensor is stored as two: codes and scales.

    Attributes:
        codes: what the name of the codes has behind the plain tensor's name.
        scales: what the name of the scales has.
        code_dtype: dtype of the codes, by which quantized tensors are told from others.
        scale_dtype: dtype of the scales.
        form: the form of a `QuantizedWeight` whose codes and scales are kept on the devices.
        kept_dtypes: dtypes of its codes and of its scales.
    """

    codes: str
    scales: str
    code_dtype: str
    scale_dtype: str
    form: str
    kept_dtypes: tuple[str, str]

    @abstractmethod
    def shape(self, codes: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shape of the plain tensor with codes of this shape; None if there is no such tensor."""

    @abstractmethod
    def scale_shape(self, codes: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales."""

    @abstractmethod
    def decode(self, codes: Tensor, scales: Tensor, index: Index) -> np.ndarray:
        """Return a range of the plain tensor, float32. No more than its blocks are read."""

    @abstractmethod
    def encode(self, values: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the codes and the scales of values.

        Blocks whose values are those of the stored codes and scales keep them, bit for bit. Others get new ones.

        Args:
            values: the plain tensor, in the dtype of the model.
            codes: the stored codes.
            scales: the stored scales.
        """

    @staticmethod
    @abstractmethod
    def fits(layout: Layout) -> bool:
        """Return whether weights of this layout can stay quantized. Their blocks must fit, too: see `scale_source`."""

    @abstractmethod
    def scale_source(self, source: Source) -> Source | None:
        """Return the source of a weight's scales; None if the weight cannot stay quantized.

        Args:
            source: the source of its codes.
        """

    def kept(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors with codes and scales in the shapes and dtypes of the parameters that hold them.

        Codes get the name of the plain tensor, and scales get this name and the suffix `scales`.
        """
        return dict(stored)

    def unkept(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Undo `kept`: convert codes and scales of a model to their stored form. Plain tensors do not change."""
        return [*tensors]

    def plain(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a folder, with plain ones in the place of codes and scales.

        Raises:
            AutoshardError: scales or codes are missing, or have other shapes or dtypes. All are named.
        """
        found, wrong = {}, []
        names = {name for name in tensors if self.is_codes(tensors[name])}
        scale_names = {self.plain_name(name) + self.scales for name in names}
        for name, tensor in tensors.items():
            if name in names:
                plain = self.plain_name(name)
                scales = tensors.get(plain + self.scales)
                if problem := self._problem(tensor, scales, plain):
                    wrong.append(problem)
                elif scales is not None:
                    found[plain] = self._plain_tensor(plain, tensor, scales)
            elif name.endswith(self.scales) and name not in scale_names:
                codes = name.removesuffix(self.scales) + self.codes
                wrong.append(f"{name} in {_file(tensor)}: there are no codes {codes} of {self.code_dtype}")
            elif name not in scale_names:
                found[name] = tensor
        if wrong:
            raise AutoshardError(f"quantized tensors cannot be read:\n{listing(wrong)}\nDownload the folder again")
        return found

    def stored(self, plain: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the tensors to write: codes and scales in the place of the plain ones that a folder has quantized.

        Args:
            plain: the tensors of a model. Those that are codes and scales already stay as they are.
            tensors: those of the folder that it was read from.
        """
        by_name = {one.name: one for one in plain}

        @functools.lru_cache(1)  # for codes and scales that are written one after the other; more would need memory
        def encoded(name: str) -> tuple[np.ndarray, np.ndarray]:
            codes, scales = tensors[name + self.codes], tensors[name + self.scales]
            return self.encode(by_name[name].read(), codes.read(), scales.read())

        def of_both(one: Tensor, part: int) -> Tensor:
            stored = tensors[one.name + (self.codes, self.scales)[part]]
            return Tensor(stored.name, stored.shape, stored.dtype, lambda: encoded(one.name)[part])

        found = []
        for one in plain:
            codes = tensors.get(one.name + self.codes)
            quantized = codes is not None and self.is_codes(codes) and one.dtype != self.code_dtype
            found += [of_both(one, 0), of_both(one, 1)] if quantized else [one]
        return found

    def plain_name(self, codes: str) -> str:
        """Return the name of the plain tensor of codes with this name."""
        return codes.removesuffix(self.codes) if self.codes else codes

    def is_codes(self, tensor: Tensor) -> bool:
        """Return whether a tensor of a folder is codes."""
        return tensor.dtype == self.code_dtype and tensor.name.endswith(self.codes)

    def _problem(self, codes: Tensor, scales: Tensor | None, plain: str) -> str:
        where = f"{codes.name} in {_file(codes)}"
        if scales is None:
            return f"{where}: its scales {plain}{self.scales} are missing"
        if self.shape(codes.shape) is None:
            return f"{where}: codes of shape {list(codes.shape)} have no blocks"
        wanted = self.scale_shape(codes.shape)
        if scales.shape != wanted or scales.dtype != self.scale_dtype:
            return (
                f"{where}: its scales {scales.name} in {_file(scales)} are {scales.dtype}{list(scales.shape)}; codes "
                f"of shape {list(codes.shape)} need {self.scale_dtype}{list(wanted)}"
            )
        return ""

    def _plain_tensor(self, name: str, codes: Tensor, scales: Tensor) -> Tensor:
        shape = self.shape(codes.shape)
        assert shape is not None

        def part(index: Index, empty: Callable[..., np.ndarray] = np.empty) -> np.ndarray:  # decoding makes its own
            return self.decode(
                codes, scales, tuple(slice(*i.indices(n)[:2]) for i, n in zip(index, shape, strict=True))
            )

        return Tensor(name, shape, PLAIN, lambda: part((slice(None),) * len(shape)), part, codes.file)


def cast_tensor(tensor: Tensor, dtype: str | None) -> Tensor:
    """Return a tensor in a dtype if it is floating-point, and in its own dtype otherwise.

    Decoded tensors are read as float32. Without a dtype, they are cast to `Tensor.dtype`.
    """
    kept = dtype if dtype is not None and "float" in tensor.dtype else tensor.dtype
    return Tensor(tensor.name, tensor.shape, kept, lambda: cast_values(tensor.name, tensor.read(), kept))


def _file(tensor: Tensor) -> str:
    return Path(tensor.file).name if tensor.file is not None else "the folder"
