"""Access to private names of JAX and Flax, and everything that depends on their versions.

No other part of autoshard imports a private name or checks a version. Supported: jax 0.10.2 (on Python 3.11) and
newer. These versions differ in the parameters of control flow (`num_consts` or `ft_in`), in the names of
primitives, in whether `Jaxpr` and `ClosedJaxpr` are two types or one, and in which modules hold their internals.

Callers use these names as attributes of this package (`_compat.bind`), so that tests can replace them here.
"""

from autoshard._compat.array_types import (
    CRASHES_ON_DONATED,
    element_shape,
    has_deleted,
    is_extended,
    is_floating,
    is_tracer,
    result_type,
    unchecked_varying,
    varying_axes,
    weakly_typed,
)
from autoshard._compat.checkpoint_policies import offloaded_names
from autoshard._compat.compile_events import call_when_lowered
from autoshard._compat.coordination import delete_text, publish_text, texts_under, wait_for_text
from autoshard._compat.equinox_objects import FilterJit, equinox_module, filter_jit_of
from autoshard._compat.flax_objects import (
    annotated_specs,
    has_graph_nodes,
    nnx_jit,
    nnx_paths,
    nnx_pure_call,
    split_graph,
)
from autoshard._compat.jaxprs import (
    ONE_JAXPR_TYPE,
    Literal,
    bind,
    bind_primitive,
    check_jaxpr,
    close,
    constants,
    dce,
    exclude_from_user_code,
    expand_by_implementation,
    expand_hijax,
    is_differentiated,
    is_jaxpr,
    is_transposed,
    jaxpr_as_function,
    needs_one_device,
    open_jaxpr,
    program_line,
    scan_arity,
    shape_dtype_of,
    solve_operands,
    source_line,
    source_of,
    split_constants,
    with_derivative_of,
)
from autoshard._compat.jit_settings import jit_settings
from autoshard._compat.memory_spaces import (
    HOST_KIND,
    abstract_array,
    is_on_host,
    memory_kind,
    planned_shape,
    space_of_device_put,
)
from autoshard._compat.meshes import all_axes_auto, auto_axes, current_mesh, no_mesh, under_trace
from autoshard._compat.primitive_lookup import ELLIPSIS, defining_modules, primitive, primitives
from autoshard._compat.user_names import user_names, with_names

__all__ = [
    "CRASHES_ON_DONATED",
    "ELLIPSIS",
    "HOST_KIND",
    "FilterJit",
    "Literal",
    "ONE_JAXPR_TYPE",
    "abstract_array",
    "all_axes_auto",
    "auto_axes",
    "bind",
    "bind_primitive",
    "call_when_lowered",
    "check_jaxpr",
    "jaxpr_as_function",
    "close",
    "constants",
    "current_mesh",
    "dce",
    "with_derivative_of",
    "element_shape",
    "equinox_module",
    "expand_by_implementation",
    "expand_hijax",
    "filter_jit_of",
    "delete_text",
    "has_deleted",
    "has_graph_nodes",
    "wait_for_text",
    "defining_modules",
    "is_differentiated",
    "is_extended",
    "is_floating",
    "is_jaxpr",
    "is_on_host",
    "is_tracer",
    "is_transposed",
    "jit_settings",
    "memory_kind",
    "needs_one_device",
    "nnx_jit",
    "nnx_paths",
    "nnx_pure_call",
    "no_mesh",
    "exclude_from_user_code",
    "offloaded_names",
    "open_jaxpr",
    "planned_shape",
    "primitive",
    "program_line",
    "primitives",
    "result_type",
    "scan_arity",
    "solve_operands",
    "source_line",
    "source_of",
    "space_of_device_put",
    "split_constants",
    "split_graph",
    "shape_dtype_of",
    "publish_text",
    "texts_under",
    "unchecked_varying",
    "under_trace",
    "user_names",
    "varying_axes",
    "weakly_typed",
    "with_names",
    "annotated_specs",
]
