"""Reads the text of a compiled program: computations, instructions, buffers, the user's source lines.

The text is what XLA's compilers for TPU, GPU and CPU print after scheduling (`is_scheduled=true`): within a computation
instructions run in the order in which they stand. An instruction is one line,

    [ROOT] %name = shape opcode(operands), attribute=value, ..., metadata={...}, backend_config={...}

A shape is `f32[8,256]{1,0:T(8,128)S(1)}` or a tuple of shapes. `S(n)` in its layout is the memory that it lives in:
none is the device's own, 1 a TPU core's on-chip memory, 5 the host's. Sizes are without the padding of tiles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

MAIN_MEMORY, HOST_MEMORY = 0, 5
# Names of an instruction's attributes that hold computations; of reductions, `to_apply` is a scalar function.
BODIES = ("calls", "called_computations", "branch_computations", "true_computation", "false_computation")
TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
# What only hands on what it is given.
HANDS_ON = ("bitcast", "copy", "get-tuple-element", "opt-barrier", "optimization-barrier", "reshape", "tuple")

_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([0-9,<= ]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
_OPCODE = re.compile(r" ?([\w\-]+)\(")
_BRACKET = re.compile(r"[()]")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+)\s*\(.*\{\s*$")
_OURS = re.compile(r"audit[/\\](compiler_process|export)\.py$")
_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclass(frozen=True)
class Array:
    """A buffer: the type of its elements, its sizes, and the memory that it lives in."""

    dtype: str
    dims: tuple[int, ...]
    space: int = MAIN_MEMORY

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> float:
        """Its bytes."""
        return self.elements * bits(self.dtype) / 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def bits(dtype: str) -> int:
    """Bits of one element."""
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else 0


def arrays_of(shape: str) -> tuple[Array, ...]:
    """The buffers of a shape."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        space = re.search(r"S\((\d+)\)", layout)
        sizes = (int(n.strip(" <=")) for n in dims.split(",") if n.strip())
        found.append(Array(dtype, tuple(sizes), int(space[1]) if space else MAIN_MEMORY))
    return tuple(found)


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
        """The buffers of its result, those of a tuple one after the other."""
        return arrays_of(self.shape)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of those whose results it takes."""
        if self.opcode in ("constant", "parameter", "iota"):
            return ()
        return tuple(re.findall(r"%([\w.\-]+)", self.arguments)) or tuple(
            part.split()[-1] for part in re.sub(r"/\*.*?\*/", "", self.arguments).split(",") if part.strip()
        )

    def attribute(self, key: str) -> str:
        """The text of an attribute without its outer braces or quotes; empty where there is none."""
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
        """The computations that it runs as a whole, not counting a loop's."""
        keys = [*BODIES, *(["to_apply"] if self.opcode.startswith(("call", "async")) else [])]
        texts = filter(None, map(self.attribute, keys))
        return tuple(name.strip().lstrip("%") for text in texts for name in text.split(","))

    @property
    def base(self) -> str:
        """Its opcode without `-start`, `-update` or `-done`."""
        return re.sub(r"-(start|update|done)$", "", self.opcode)

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from, `jit(step)/jvp()/dot_general`."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """What a custom call calls."""
        return self.attribute("custom_call_target")

    @property
    def index(self) -> int:
        """Which element a `get-tuple-element` takes."""
        return int(self.attribute("index") or 0)


@dataclass(eq=False)
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def named(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {i.name: i for i in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        """The one whose result is the computation's."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        return {int(i.arguments): i for i in self.instructions if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Name -> those that take its result."""
        found: dict[str, list[Instruction]] = {}
        for i in self.instructions:
            for name in dict.fromkeys(i.operands):
                found.setdefault(name, []).append(i)
        return found

    def takes(self, instruction: Instruction) -> list[Instruction]:
        """Those whose results an instruction takes."""
        return [self.named[name] for name in instruction.operands if name in self.named]


@dataclass(eq=False)
class Program:
    """A compiled program."""

    computations: dict[str, Computation]
    entry: Computation
    partitions: int
    tables: dict[str, dict[int, str]]

    def inside(self, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """The instructions of what one runs as a whole, at any depth, with the computations that they stand in."""
        for name in instruction.called:
            if name in self.computations:
                for inner in self.computations[name].instructions:
                    yield self.computations[name], inner
                    yield from self.inside(inner)

    def line(self, instruction: Instruction) -> str:
        """The user's line, `file.py:12 (function)`; empty where the text does not say."""
        text = instruction.attributes
        if direct := re.search(r'source_file="([^"]*)"\s+source_line=(\d+)', text):
            return f"{direct[1]}:{direct[2]}"
        frame = re.search(r"stack_frame_id=(\d+)", text)
        return self._frame(int(frame[1])) if frame else ""

    def _frame(self, number: int) -> str:
        """The innermost line of a stack that is not of those which export a program and run it."""
        seen: set[int] = set()
        while number and number not in seen:
            seen.add(number)
            frame = self._row("StackFrames", number)
            place = self._row("FileLocations", frame.get("file_location_id", 0))
            file = self._name("FileNames", place.get("file_name_id", 0))
            if file and not _OURS.search(file):
                function = self._name("FunctionNames", place.get("function_name_id", 0))
                return f"{file}:{place.get('line', 0)}" + (f" ({function})" if function else "")
            number = frame.get("parent_frame_id", 0)
        return ""

    def _row(self, table: str, number: int) -> dict[str, int]:
        text = self.tables.get(table, {}).get(number, "")
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}

    def _name(self, table: str, number: int) -> str:
        return self.tables.get(table, {}).get(number, "").strip('"')


def read(text: str) -> Program:
    """The program that a text is.

    Raises:
        ValueError: it is none.
    """
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {name: {} for name in TABLES}
    current: Computation | None = None
    table: dict[int, str] | None = None
    entry = ""
    for line in text.splitlines():
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
        raise ValueError("no ENTRY computation in the compiled program")
    partitions = re.search(r"num_partitions=(\d+)", text.partition("\n\n")[0])
    return Program(computations, computations[entry], int(partitions[1]) if partitions else 1, tables)


def instruction(line: str) -> Instruction:
    """The instruction on a line.

    Raises:
        ValueError: it is none.
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
    """Where the bracket that opens at `start` is closed."""
    depth = 0
    for found in re.finditer(f"[{re.escape(opens + closes)}]", text[start:]):
        depth += 1 if found[0] == opens else -1
        if depth == 0:
            return start + found.start()
    raise ValueError(f"no closing {closes!r}: {text[start : start + 80]!r}")
