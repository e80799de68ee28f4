"""Names for the instructions of a compiled program, with which a trace of it can be read.

XLA's partitioner inserts most collectives and names them `all-gather.12`. Here each gets the plan's name: its kind, the
mesh axes, the source line, the input that it gathers if it is one, the bytes and the time that the links need. Every
instruction gets the scope of the module from which it comes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard._shown import shown
from autoshard._units import line_text
from autoshard.sharding.audit.constants import NAMED_TENSORS, SEARCH_STEPS
from autoshard.sharding.audit.replicated_arrays import scheduled
from autoshard.sharding.hlo.collectives import Collective, Collectives
from autoshard.sharding.hlo.kernel_costs import Kernels
from autoshard.sharding.hlo.link_times import ProgramLinks
from autoshard.sharding.hlo.parser import FORWARDING, Computation, Instruction, Program, parse_program
from autoshard.sharding.hlo.replica_groups import axes_of
from autoshard.sharding.hlo.schedule import CollectiveRuns, Schedule
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.program.argument_names import named_path

# Parts of the origin of an instruction that are no module: how JAX calls functions.
CALLS = frozenset(
    "branch_0_fun branch_1_fun body body_fun call checkpoint closed_call cond cond_fun core_call custom_jvp_call "
    "custom_vjp_call eval_jaxpr jit pjit remat remat2 rematted_computation scan shard_map while".split()
)
_WRAPPED = re.compile(r"(?:jvp|transpose|vmap|remat|checkpoint)\((.*)\)")
_ELEMENTWISE = (
    *(opcode for opcode in FORWARDING if opcode != "tuple"), "add", "all-gather", "convert", "divide",
    "dynamic-update-slice", "fusion", "multiply", "reduce-scatter", "select", "slice", "subtract", "transpose",
)  # fmt: skip
_MOVES = (*FORWARDING, "convert", "dynamic-slice", "slice", "transpose", "fusion", "all-gather-start")


@shown
@dataclass(frozen=True)
class NamedCollective:
    """A collective of a compiled program.

    Attributes:
        instruction: Name of the instruction that runs or starts it, as a trace has it.
        ends: Names of the instructions that end it, if it is asynchronous.
        name: What it is, in one line: `all-gather over fsdp of state/params/wq, gpt.py:88 (attention)`.
        kind: Its kind, such as `all-gather`.
        axes: The mesh axes that it spans.
        tensors: Paths of the inputs that it gathers, or of the parameters whose gradients it reduces; empty if it moves
            activations or if unknown.
        module: The module from which it comes: its named scopes or those of its tensors' module, else the path above
            its tensors, else a function.
        line: The source line from which it comes.
        is_planned: Whether the plan has a collective of this kind over these axes.
        step_bytes: Bytes that each device sends in a step.
        runs: Number of its runs in a step.
        predicted_us: Microseconds of all its runs in a step.
        exposed_us: The part of them that compute does not hide, by the schedule of the compiled program.
    """

    instruction: str
    ends: tuple[str, ...]
    name: str
    kind: str
    axes: tuple[str, ...]
    tensors: tuple[str, ...]
    module: str
    line: str
    is_planned: bool
    step_bytes: float
    runs: float
    predicted_us: float
    exposed_us: float


@shown
@dataclass(frozen=True)
class NamedProgram:
    """A compiled program with names for its instructions.

    Attributes:
        module: Name of the program, as a trace has it.
        collectives: Its collectives, in the order in which they first run.
        modules: Name of every scheduled instruction -> the module from which it comes; empty if unknown.
        compute_us: Predicted microseconds of compute in a step.
    """

    module: str
    collectives: tuple[NamedCollective, ...]
    modules: Mapping[str, str] = field(repr=False)
    compute_us: float = 0.0


def name_collectives(plan: ShardingPlan, text: str) -> NamedProgram:
    """Name the instructions of a plan's compiled program.

    Args:
        plan: The plan.
        text: The text of the compiled program.

    Raises:
        ValueError: The text is not a compiled program.
        TargetError: The plan's target is unknown.
    """
    program = parse_program(text)
    head = re.match(r"HloModule ([\w.\-]+)", text)
    target = find_target(plan.target)
    schedule = Schedule(program, Kernels(program, target.chip), ProgramLinks(target.topology, plan.device_order))
    schedule.run()
    mesh = dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True))
    planned = {(kind, frozenset(axes.split())) for kind, axes, *_ in plan.traffic}
    ends = dict(_ends(program))
    scopes = {module_scope(_origin(program, i)[0]) for _, i in scheduled(program)} - {""}
    return NamedProgram(
        module=head[1] if head else "",
        collectives=tuple(
            _named(plan, program, place, runs, mesh, planned, ends, scopes)
            for (*place, _), runs in schedule.runs.items()
            if runs.trips
        ),
        modules={i.name: module_of(*_origin(program, i)) for _, i in scheduled(program)},
        compute_us=schedule.totals.compute_us,
    )


def _named(
    plan: ShardingPlan,
    program: Program,
    place: Sequence[str],
    runs: CollectiveRuns,
    mesh: Mapping[str, int],
    planned: set[tuple[str, frozenset[str]]],
    ends: Mapping[str, tuple[str, ...]],
    scopes: Collection[str],
) -> NamedCollective:
    computation = program.computations[place[0]]
    c, instruction = runs.collective, computation.by_name[place[1]]
    axes = tuple(axes_of(c.groups, mesh, c.is_permute) or ())
    tensors = tuple(dict.fromkeys(_tensors(plan, program, computation, instruction, c.kind)))
    line = line_text(c.line)
    return NamedCollective(
        instruction=instruction.name,
        ends=ends.get(instruction.name, ()),
        name=f"{c.kind} over {' '.join(axes) or 'other groups'} of {_what(c, tensors)}, {line}",
        kind=c.kind,
        axes=axes,
        tensors=tensors,
        module=_module(c, tensors, scopes),
        line=line,
        is_planned=(c.kind, frozenset(axes)) in planned,
        step_bytes=c.wire_bytes * runs.trips,
        runs=runs.trips,
        predicted_us=runs.once_us * runs.trips,
        exposed_us=runs.exposed_us,
    )


def _module(c: Collective, tensors: Sequence[str], scopes: Collection[str]) -> str:
    """The module of a collective. XLA gives a gather of a layer's weights the scope of the loop over all layers."""
    own, found = module_scope(c.op_name), [scope_of_path(path, scopes) for path in tensors]
    shared = "/".join(_common([scope.split("/") for scope in found]))
    if shared and (not own or shared.startswith(f"{own}/")):
        return shared
    return own or _common_parent(tensors) or module_of("", c.line)


def scope_of_path(path: str, scopes: Collection[str]) -> str:
    """Return the scope of the module that has a parameter, of a program's scopes; empty if there is none.

    The last name of the scope is in the path: the scope of a module is named after its attribute. Of several such
    scopes, it is the one whose name comes last in the path, then the one with the most names of the path.

    Example:
        >>> scope_of_path("0/params/blocks/attention/wq", ["layers", "layers/attention", "layers/mlp"])
        'layers/attention'
    """
    levels = path.split("/")
    found = [names for names in (scope.split("/") for scope in scopes) if names[-1] in levels]
    best = max(found, key=lambda names: (levels.index(names[-1]), len({*names} & {*levels}), names), default=[])
    return "/".join(best)


def _ends(program: Program) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of each start of an asynchronous collective, and the names of its ends."""
    collectives = Collectives(program)
    starts: dict[str, str] = {}
    found: dict[str, list[str]] = {}
    for computation, i in scheduled(program):
        for event in collectives.events(computation, i):
            if event.phase == "start":
                starts[event.key] = i.name
            elif event.phase == "done":
                found.setdefault(event.key, []).append(i.name)
    for key, name in starts.items():
        yield name, tuple(found.get(key, ()))


def _origin(program: Program, i: Instruction) -> tuple[str, str]:
    """The origin and the source line of an instruction; of one without, such as a fusion, those of the first inside."""
    for each in (i, *(inner for _, inner in program.inside(i))):
        if each.op_name:
            return each.op_name, program.line(each)
    return "", program.line(i)


def module_of(op_name: str, line: str) -> str:
    """Return the module from which an instruction comes: its named scopes, else the function of its source line.

    Example:
        >>> module_of("jit(step)/jvp(GPT)/attention/dot_general", "/home/me/gpt.py:88 (attend)")
        'GPT/attention'
        >>> module_of("jit(step)/jvp(bse,ed->bsd)/dot_general", "/home/me/gpt.py:88 (attend)")
        'me/gpt.py (attend)'
    """
    if scope := module_scope(op_name):
        return scope
    found = re.fullmatch(r"(.*?):\d+(?: (\(.*\)))?", line_text(line))
    return f"{found[1]} {found[2] or ''}".strip() if found else ""


def module_scope(op_name: str) -> str:
    """Return the named scopes of an instruction's origin, without those that JAX adds: calls, and einsums' formulas.

    Example:
        >>> module_scope("jit(step)/transpose(jvp(GPT))/while/body/closed_call/attention/dot_general")
        'GPT/attention'
        >>> module_scope("jit(step)/jvp()/mul")
        ''
    """
    parts = _parts(op_name)[:-1]  # the last one is the primitive
    names = [name for part in parts for name in _unwrapped(part) if name and name not in CALLS and "->" not in name]
    return "/".join(name for n, name in enumerate(names) if not n or names[n - 1] != name)


def _parts(op_name: str) -> list[str]:
    """Split at slashes outside brackets."""
    parts, depth = [""], 0
    for letter in op_name:
        depth += (letter in "([") - (letter in ")]")
        if letter == "/" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _unwrapped(part: str) -> list[str]:
    if part.startswith(("jit(", "pjit(")):
        return []
    while found := _WRAPPED.fullmatch(part):
        part = found[1]
    return [name for each in _parts(part) for name in ([each] if each == part else _unwrapped(each))]


def _what(collective: Collective, tensors: Sequence[str]) -> str:
    """What a collective moves: inputs, gradients, or the result of an operator."""
    if tensors:
        return f"{'' if collective.kind == 'all-gather' else 'gradients of '}{_listed(tensors)}"
    if ":" in collective.op_name:  # XLA combined several into one
        return "several values"
    parts = _parts(collective.op_name)
    formula = next((name for part in parts for name in _unwrapped(part) if "->" in name), parts[-1])
    backward = " in the backward pass" if "transpose(" in collective.op_name else ""
    return f"{formula or 'an operator without a name'}{backward}"


def _common_parent(paths: Sequence[str]) -> str:
    """The deepest path above all of these paths; empty if there is none."""
    return "/".join(_common([path.split("/")[:-1] for path in paths]))


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    """The names with which all of these paths begin."""
    levels = itertools.takewhile(lambda names: len({*names}) == 1, zip(*paths, strict=False))
    return [names[0] for names in levels]


def _listed(paths: Sequence[str]) -> str:
    more = len(paths) - NAMED_TENSORS
    return ", ".join(paths[:NAMED_TENSORS]) + (f" and {more} more" if more > 0 else "")


def _tensors(
    plan: ShardingPlan, program: Program, computation: Computation, start: Instruction, kind: str
) -> Iterator[str]:
    if kind == "all-gather":
        return _inputs(plan, program, computation, start)
    return _gradients(plan, program, computation, start) if kind in ("all-reduce", "reduce-scatter") else iter(())


def _inputs(plan: ShardingPlan, program: Program, computation: Computation, start: Instruction) -> Iterator[str]:
    """Yield the paths of the program's inputs that a collective moves, through copies, slices, casts and loops."""
    entry = program.entry
    if len(entry.parameters) != len(plan.inputs):  # JAX left out inputs that the program does not use
        return
    numbers = {i.name: n for n, i in entry.parameters.items()}
    loops = _loops(program)
    pending: list[tuple[Computation, Instruction, tuple[int, ...]]]
    pending = [(computation, operand, ()) for operand in _data(computation, start)]
    for _ in range(SEARCH_STEPS):
        if not pending:
            return
        where, i, indices = pending.pop()
        if where is entry and i.name in numbers:
            yield named_path(plan.inputs[numbers[i.name]].path, plan.arguments)
        elif i.opcode == "get-tuple-element":
            pending += [(where, operand, (i.index, *indices)) for operand in where.operands_of(i)]
        elif i.opcode == "tuple" and indices:
            pending.append((where, where.operands_of(i)[indices[0]], indices[1:]))
        elif i.opcode == "while":
            pending += [(where, operand, indices) for operand in where.operands_of(i)]
        elif i.opcode == "parameter" and where.name in loops:
            outer, loop = loops[where.name]
            pending += [(outer, operand, indices) for operand in outer.operands_of(loop)]
        elif i.opcode in _MOVES and not _has_product(program, i):
            pending += [(where, operand, indices) for operand in _data(where, i)]


def _gradients(plan: ShardingPlan, program: Program, computation: Computation, start: Instruction) -> Iterator[str]:
    """Yield the paths of the updated parameters into which the result of a reduction goes.

    The result, or the shard of it that a device keeps, is followed through elementwise operators, copies and the stacks
    that loops return. A product or a smaller result ends the search: what comes after it is another value.
    """
    results = program.entry.operands_of(program.entry.root)
    if program.entry.root.opcode != "tuple" or len(results) != len(plan.outputs):
        return
    paths = [leaf.path for leaf in plan.inputs if leaf.role == "parameter"]
    # A step returns the state in a tuple, `0/params/wq` as in its arguments, or alone, `params/wq`.
    parameters = {path.partition("/")[2]: path for path in paths} | {path: path for path in paths}
    parameters = {result: named_path(path, plan.arguments) for result, path in parameters.items()}
    loops = _loops(program)
    parts = computation.users.get(start.name, []) if start.shape.startswith("(") else [start]
    parts = [part for part in parts if _largest(part) > 1]  # a sum, such as the norm of all gradients, scales them all
    pending = [(computation, part, _largest(part) / program.partitions) for part in parts]
    seen = {part.name for part in parts}
    for _ in range(SEARCH_STEPS):
        if not pending:
            return
        where, i, least = pending.pop(0)
        for user in where.users.get(i.name, ()):
            positions = [n for n, name in enumerate(user.operands) if name == i.name]
            following = []
            if user is program.entry.root:
                updated = [plan.outputs[n].path for n in positions]
                yield from (parameters[path] for path in updated if path in parameters)
            elif user.opcode == "tuple" and user is where.root and where.name in loops:
                outer, loop = loops[where.name]
                following = [(outer, g, least) for g in outer.users.get(loop.name, ()) if g.index in positions]
            elif user.opcode in _ELEMENTWISE and _largest(user) >= least and not _has_product(program, user):
                following = [(where, user, least)]
            pending += [each for each in following if each[1].name not in seen]
            seen |= {each[1].name for each in following}


def _largest(i: Instruction) -> int:
    return max((array.elements for array in i.arrays), default=0) if i.opcode != "tuple" else 0


def _has_product(program: Program, i: Instruction) -> bool:
    """Whether a fusion contains a product."""
    return any(inner.opcode in ("dot", "convolution", "custom-call") for _, inner in program.inside(i))


def _data(computation: Computation, i: Instruction) -> list[Instruction]:
    """The operand with the most elements: the others of a slice or a fusion are indices."""
    operands = computation.operands_of(i)
    if i.opcode in ("tuple", "all-gather", "all-gather-start"):
        return operands
    return sorted(operands, key=lambda operand: -sum(a.elements for a in operand.arrays))[:1]


def _loops(program: Program) -> dict[str, tuple[Computation, Instruction]]:
    """Body -> the computation and the instruction of its loop."""
    return {
        i.attribute("body"): (computation, i)
        for computation in program.computations.values()
        for i in computation.instructions
        if i.opcode == "while"
    }
