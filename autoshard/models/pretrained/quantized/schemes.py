"""The scheme of a folder, by the `quantization_config` of its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.models.pretrained.families.family import Config
from autoshard.models.pretrained.quantized.fp8_blocks import Fp8Blocks
from autoshard.models.pretrained.quantized.mxfp4 import Mxfp4
from autoshard.models.pretrained.quantized.scheme import Scheme

QUANTIZATION = "quantization_config"
METHODS = ("fp8", "mxfp4")

__all__ = ["METHODS", "QUANTIZATION", "Scheme", "scheme_of"]


def scheme_of(config: Config) -> Scheme | None:
    """Return the scheme in which a folder's tensors are quantized; None if they are not.

    Raises:
        AutoshardError: the scheme is not built.
    """
    found = config.values.get(QUANTIZATION)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise config.refuse(f"{QUANTIZATION} is {found!r}; it must be a table")
    own = Config(found, f"{config.where}, {QUANTIZATION}")
    method = found.get("quant_method")
    if method == "mxfp4":
        return Mxfp4()
    if method != "fp8":
        raise own.refuse(
            f"quant_method is {method!r}; built are {', '.join(METHODS)}. Use a folder that is not quantized, or one "
            "of these methods"
        )
    own.refuse_values(activation_scheme="dynamic", fmt="e4m3")
    sizes = found.get("weight_block_size")
    if not isinstance(sizes, list) or len(sizes) != 2 or any(type(n) is not int or n < 1 for n in sizes):
        raise own.refuse(f"weight_block_size is {sizes!r}; it must be two whole numbers of at least 1")
    form = found.get("scale_fmt")
    if form not in (None, "float", "ue8m0"):
        raise own.refuse(f"scale_fmt is {form!r}; built are 'float' and 'ue8m0'")
    return Fp8Blocks(*sizes, powers=form == "ue8m0")
