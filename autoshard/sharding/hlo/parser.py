"""Parses the text of a compiled program: computations, instructions, buffers, the user's source lines.

The text is what XLA's compilers for TPU, GPU and CPU print after scheduling (`is_scheduled=true`): the instructions of
a computation run in the order in which they are printed. An instruction is one line (an attribute may break it),

    [ROOT] %name = shape opcode(operands), attribute=value, ..., metadata={...}, backend_config={...}

An asynchronous slice is one line in the text of a program with machine code, `dynamic-slice-start(...)`. A dump writes
it as `async-start(...), calls=%computation`, with the slice in that computation. Both are parsed to the first form.

A shape is `f32[8,256]{1,0:T(8,128)S(1)}` or a tuple of shapes. `S(n)` in its layout is the memory space: 1 is a TPU
core's on-chip memory, 5 the host's memory, none the device's main memory. Sizes do not include the padding of tiles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autoshard._shown import shown

MAIN_MEMORY, HOST_MEMORY = 0, 5
# Attributes of an instruction that name computations. `to_apply` is one of them for calls only. In a reduction, it
# names a scalar function.
BODIES = ("calls", "called_computations", "branch_computations", "true_computation", "false_computation")
TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
SLICES = ("slice", "dynamic-slice", "dynamic-update-slice")
# Opcodes that forward their operands unchanged.
FORWARDING = ("bitcast", "copy", "get-tuple-element", "opt-barrier", "optimization-barrier", "reshape", "tuple")

_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([0-9,<= ]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
_OPCODE = re.compile(r" ?([\w\-]+)\(")
_BRACKET = re.compile(r"[()]")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+)\s*\(.*\{\s*$")
_END = re.compile(r'\}(, execution_thread="[^"]*")?(\s*//.*)?')
_CALLS = re.compile(r"(^|(?<=, ))calls=%?[\w.\-]+(, )?")
_COMPILING = re.compile(r"audit[/\\](compiler_process|export)\.py$")
_BITS = {"pred": 8, "token": 0, "opaque": 0}


@shown
@dataclass(frozen=True)
class Array:
    """A buffer: its element type, its sizes and its memory space."""

    dtype: str
    dims: tuple[int, ...]
    space: int = MAIN_MEMORY

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> float:
        """Its size in bytes."""
        return self.elements * bits(self.dtype) / 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def bits(dtype: str) -> int:
    """Bits of one element of a type such as `bf16`; 0 for tokens and unknown types."""
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else 0


def arrays_of(shape: str) -> tuple[Array, ...]:
    """The buffers of a shape, those of a tuple in order."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        space = re.search(r"S\((\d+)\)", layout)
        sizes = (int(n.strip(" <=")) for n in dims.split(",") if n.strip())
        found.append(Array(dtype, tuple(sizes), int(space[1]) if space else MAIN_MEMORY))
    return tuple(found)


@shown
@dataclass(eq=False)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str
    arguments: str
    attributes: str
    is_root: bool = False

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The buffers of its result, those of a tuple in order."""
        return arrays_of(self.shape)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of its operands."""
        if self.opcode in ("constant", "parameter", "iota"):
            return ()
        return tuple(re.findall(r"%([\w.\-]+)", self.arguments)) or tuple(
            part.split()[-1] for part in re.sub(r"/\*.*?\*/", "", self.arguments).split(",") if part.strip()
        )

    def attribute(self, key: str) -> str:
        """The text of an attribute without its outer braces or quotes; empty if there is none."""
        found = re.search(rf"(?:^|, ){key}=", self.attributes)
        if not found:
            return ""
        rest = self.attributes[found.end() :]
        if rest.startswith("{"):
            return rest[1 : _closing(rest, 0, "{", "}")]
        if rest.startswith('"'):
            return rest[1 : rest.index('"', 1)]
        return rest.partition(",")[0].lstrip("%")

    @cached_property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs, except those of a loop."""
        keys = [*BODIES, *(["to_apply"] if self.opcode.startswith(("call", "async")) else [])]
        texts = filter(None, map(self.attribute, keys))
        return tuple(name.strip().lstrip("%") for text in texts for name in text.split(","))

    @property
    def base(self) -> str:
        """Its opcode without `-start`, `-update` or `-done`."""
        return re.sub(r"-(start|update|done)$", "", self.opcode)

    @property
    def op_name(self) -> str:
        """Its origin in the traced program, `jit(step)/jvp()/dot_general`; empty if unknown."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return self.attribute("custom_call_target")

    @property
    def index(self) -> int:
        """The index of a `get-tuple-element`."""
        return int(self.attribute("index") or 0)


@shown
@dataclass(eq=False)
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {i.name: i for i in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's result."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        return {int(i.arguments): i for i in self.instructions if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Name of an instruction -> the instructions of which it is an operand."""
        found: dict[str, list[Instruction]] = {}
        for i in self.instructions:
            for name in dict.fromkeys(i.operands):
                found.setdefault(name, []).append(i)
        return found

    def operands_of(self, instruction: Instruction) -> list[Instruction]:
        """The operands of an instruction of this computation."""
        return [self.by_name[name] for name in instruction.operands if name in self.by_name]


@shown
@dataclass(eq=False)
class Program:
    """A compiled program.

    Attributes:
        computations: name -> computation.
        entry: the entry computation.
        partitions: number of partitions, one for each device.
        tables: name of a table of source locations -> id -> row.
    """

    computations: dict[str, Computation]
    entry: Computation
    partitions: int
    tables: dict[str, dict[int, str]]

    def inside(self, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """Yields the instructions that an instruction runs, at any depth, each with its computation."""
        for name in instruction.called:
            if name in self.computations:
                for inner in self.computations[name].instructions:
                    yield self.computations[name], inner
                    yield from self.inside(inner)

    def line(self, instruction: Instruction) -> str:
        """The user's source line, `file.py:12 (function)`; empty if the text has none."""
        text = instruction.attributes
        if direct := re.search(r'source_file="([^"]*)"\s+source_line=(\d+)', text):
            return f"{direct[1]}:{direct[2]}"
        frame = re.search(r"stack_frame_id=(\d+)", text)
        return self._frame(int(frame[1])) if frame else ""

    def _frame(self, number: int) -> str:
        """The innermost frame of a stack that is not in the modules which export and compile programs."""
        visited: set[int] = set()
        while number and number not in visited:
            visited.add(number)
            frame = self._row("StackFrames", number)
            location = self._row("FileLocations", frame.get("file_location_id", 0))
            file = self._name("FileNames", location.get("file_name_id", 0))
            if file and not _COMPILING.search(file):
                function = self._name("FunctionNames", location.get("function_name_id", 0))
                return f"{file}:{location.get('line', 0)}" + (f" ({function})" if function else "")
            number = frame.get("parent_frame_id", 0)
        return ""

    def _row(self, table: str, number: int) -> dict[str, int]:
        text = self.tables.get(table, {}).get(number, "")
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}

    def _name(self, table: str, number: int) -> str:
        return self.tables.get(table, {}).get(number, "").strip('"')


def parse_program(text: str) -> Program:
    """Parses the text of a compiled program.

    Raises:
        ValueError: the text is not a compiled program.
    """
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {name: {} for name in TABLES}
    current: Computation | None = None
    table: dict[int, str] | None = None
    entry = ""
    for line in _unwrapped(text):
        if not line.strip():
            continue
        if current is not None and line[:1] == " ":
            current.instructions.append(instruction(line))
        elif line.strip() in tables:
            current, table = None, tables[line.strip()]
        elif table is not None and (row := re.match(r"(\d+) (.*)", line)):
            table[int(row[1])] = row[2]
        elif head := _HEADER.match(line):
            current = computations[head[2]] = Computation(head[2])
            entry, table = head[2] if head[1] else entry, None
    if not entry:
        raise ValueError("no ENTRY computation: pass the text of a compiled program")
    for each in computations.values():
        _name_slices(each, computations)
    partitions = re.search(r"num_partitions=(\d+)", text.partition("\n\n")[0])
    return Program(computations, computations[entry], int(partitions[1]) if partitions else 1, tables)


def _name_slices(computation: Computation, computations: Mapping[str, Computation]) -> None:
    """Give asynchronous slices that call a computation the opcodes that they have without it."""
    for i in computation.instructions:
        if i.opcode == "async-start":
            body = computations.get(i.attribute("calls"))
            if body is not None and body.root.opcode in SLICES and len(body.instructions) == len(body.parameters) + 1:
                i.opcode = f"{body.root.opcode}-start"
                i.attributes = _CALLS.sub("", i.attributes)
        elif i.opcode in ("async-update", "async-done"):
            starts = computation.operands_of(i)[:1]
            if starts and starts[0].base in SLICES:
                i.opcode = i.opcode.replace("async", starts[0].base)


def _unwrapped(text: str) -> Iterator[str]:
    """Yields the lines of a program. Each instruction is one line, even if an attribute contains line breaks.

    The metadata of JAX's splash attention kernels contains line breaks.
    """
    parts: list[str] = []
    inside = False
    for line in text.splitlines():
        ends = _END.fullmatch(line) is not None
        if inside and line and not ends and line[:1] != " ":
            parts.append(line)
            continue
        if parts:
            yield "".join(parts)
        parts = [line]
        inside = not ends and (inside or _HEADER.match(line) is not None)
    yield "".join(parts)


def instruction(line: str) -> Instruction:
    """Parses the instruction on a line.

    Raises:
        ValueError: the line is not an instruction.
    """
    head = _LINE.match(line)
    if not head:
        raise ValueError(f"not an instruction: {line[:120]!r}")
    rest = head[3]
    end = _closing(rest, 0, "(", ")") + 1 if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end)
    if not opcode:
        raise ValueError(f"no opcode: {line[:120]!r}")
    closes = _closing(rest, opcode.end() - 1, "(", ")")
    attributes = rest[closes + 1 :].removeprefix(", ")
    return Instruction(head[2], opcode[1], rest[:end], rest[opcode.end() : closes], attributes, bool(head[1]))


def _closing(text: str, start: int, opens: str, closes: str) -> int:
    """The index of the bracket that closes the one at `start`."""
    depth = 0
    for found in re.finditer(f"[{re.escape(opens + closes)}]", text[start:]):
        depth += 1 if found[0] == opens else -1
        if depth == 0:
            return start + found.start()
    raise ValueError(f"no closing {closes!r}: {text[start : start + 80]!r}")
