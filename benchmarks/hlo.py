"""Read scheduled HLO text: computations, instructions, shapes, source lines.

The text is that of XLA:TPU (libtpu 0.0.42, 0.0.50), XLA:GPU or XLA:CPU for an SPMD program, with instructions in the
order of the compiler's schedule (`is_scheduled=true`). Sizes are in bytes and without the padding of tiles.

A buffer's layout names its memory: `S(1)` is a TPU core's on-chip memory, `S(5)` the host's, other numbers are
semaphores and scalar memory. Without `S` it is the device's main memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

HBM, ON_CHIP, HOST = 0, 1, 5
BITS = {"pred": 8, "token": 0, "opaque": 0, "s2": 2, "u2": 2, "s4": 4, "u4": 4}
ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](?:\{([^}]*)\})?")
CLOSING = re.compile(r'\}(, execution_thread="[^"]*")?(\s*//.*)?')  # the last line of a computation
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")


@dataclass(frozen=True)
class Array:
    """A buffer: its type, its size in each dimension, and the memory that holds it."""

    dtype: str
    dims: tuple[int, ...]
    space: int = HBM

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.dims)

    @property
    def bytes(self) -> float:
        """The size in bytes, without padding."""
        return self.elements * bits_of(self.dtype) / 8


@dataclass(frozen=True)
class Instruction:
    """One line: `name = shape opcode(arguments), attributes`. A tuple's shape is a tuple of shapes."""

    name: str
    shape: Array | tuple
    opcode: str
    arguments: str
    attributes: str
    root: bool = False

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of its operands."""
        if self.opcode in ("constant", "parameter", "iota"):
            return ()
        if "%" in self.arguments:
            return tuple(re.findall(r"%([\w.\-]+)", self.arguments))
        return tuple(part.split()[-1] for part in re.sub(r"/\*.*?\*/", "", self.arguments).split(",") if part.strip())

    @cached_property
    def leaves(self) -> tuple[Array, ...]:
        """The buffers of its result."""
        return tuple(_leaves(self.shape))

    def attribute(self, name: str) -> str | None:
        """Return a plain attribute's text: a name, a number, or the text between braces."""
        found = re.search(rf"(?:^|, ){name}=(?:\{{([^{{}}]*)\}}|%?([^,\s]+))", self.attributes)
        return found and (found[1] if found[1] is not None else found[2])

    @cached_property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs: of a fusion, a call, an asynchronous wrapper or the branches."""
        names = (self.attribute(key) for key in ("calls", "called_computations", "branch_computations"))
        found = [part.strip().lstrip("%") for text in names if text for part in text.split(",")]
        found += [text for key in ("true_computation", "false_computation") if (text := self.attribute(key))]
        is_call = self.opcode.startswith(("call", "async"))  # elsewhere `to_apply` is a reduction's scalar function
        return (*found, *([text] if is_call and (text := self.attribute("to_apply")) else []))

    @cached_property
    def channel(self) -> str | None:
        """The channel, which a collective's start and end share."""
        return self.attribute("channel_id")

    @cached_property
    def op_name(self) -> str:
        """Its origin in the traced program."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""


@dataclass
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def named(self) -> Mapping[str, Instruction]:
        """The instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next((i for i in self.instructions if i.root), self.instructions[-1])

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """The parameters by number."""
        return {int(i.arguments): i for i in self.instructions if i.opcode == "parameter"}

    @cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """The users of each instruction's result."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found

    def inputs(self, instruction: Instruction) -> list[Instruction]:
        """Return the operands of an instruction."""
        return [self.named[name] for name in instruction.operands if name in self.named]


@dataclass
class Module:
    """A program: its computations, its entry, its number of partitions, and its source lines."""

    computations: dict[str, Computation]
    entry: Computation
    partitions: int
    tables: Mapping[str, Mapping[int, str]]

    @cached_property
    def loops(self) -> Mapping[str, tuple[Computation, Instruction]]:
        """For each loop's body, the loop and the computation that contains it."""
        every = ((where, i) for where in self.computations.values() for i in where.instructions)
        return {i.attribute("body") or "": (where, i) for where, i in every if i.opcode == "while"}

    def source(self, instruction: Instruction) -> str:
        """Return `file:line` of the user's code, or an empty text if unknown."""
        direct = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
        frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        if direct or not frame:
            return f"{direct[1]}:{direct[2]}" if direct else ""
        location = self._entry("FileLocations", self._entry("StackFrames", frame[1]).get("file_location_id", ""))
        name = self.tables.get("FileNames", {}).get(int(location.get("file_name_id", 0)), "")
        return f"{name.strip(chr(34))}:{location.get('line', 0)}" if name else ""

    def _entry(self, table: str, key: str) -> dict[str, str]:
        text = self.tables.get(table, {}).get(int(key), "") if key else ""
        return dict(re.findall(r"(\w+)=(\d+)", text))

    def within(self, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """Yield every instruction that an instruction runs, at any depth, with its computation."""
        for name in instruction.called:
            for inner in self.computations[name].instructions:
                yield self.computations[name], inner
                yield from self.within(inner)


def read(text: str) -> Module:
    """Parse a program."""
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {}
    entry, current, table = "", None, None
    for line in _unwrapped(text):
        if line.startswith((" ", "\t")) and current is not None:
            current.instructions.append(instruction_of(line))
        elif line.endswith("{") and not line.startswith("HloModule"):
            name = line.removeprefix("ENTRY ").lstrip("%").split()[0].split("(")[0]
            current, table = computations.setdefault(name, Computation(name)), None
            entry = name if line.startswith("ENTRY ") else entry
        elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            current, table = None, tables.setdefault(line, {})
        elif table is not None and (numbered := re.match(r"(\d+) (.*)", line)):
            table[int(numbered[1])] = numbered[2]
    partitions = re.search(r"num_partitions=(\d+)", text[:1_000_000].split("\n\n", 1)[0])
    return Module(computations, computations[entry], int(partitions[1]) if partitions else 1, tables)


def _unwrapped(text: str) -> Iterator[str]:
    """Yield the lines of a program. Each instruction is one line, even if an attribute contains line breaks.

    The metadata of JAX's splash attention kernels contains line breaks.
    """
    parts: list[str] = []
    inside = False
    for line in text.splitlines():
        ends = CLOSING.fullmatch(line) is not None
        if inside and parts and line and not ends and not line.startswith((" ", "\t")):
            parts.append(line)
            continue
        if parts:
            yield "".join(parts)
        parts = [line]
        inside = not ends and (inside or (line.endswith("{") and not line.startswith(("HloModule", " ", "\t"))))
    yield "".join(parts)


def instruction_of(line: str) -> Instruction:
    """Parse a line as an instruction."""
    head = INSTRUCTION.match(line)
    if head is None:
        raise ValueError(f"not an instruction: {line[:120]!r}")
    at = head.end()
    end = _closing(line, at) if line[at] == "(" else line.index(" ", at)
    shape = shape_of(line[at:end])
    opens = line.index("(", end)
    closes = _closing(line, opens)
    attributes = line[closes:].removeprefix(", ")
    return Instruction(head[2], shape, line[end:opens].strip(), line[opens + 1 : closes - 1], attributes, bool(head[1]))


def shape_of(text: str) -> Array | tuple:
    """Parse a shape: `f32[2,3]{1,0:T(8,128)S(1)}`, or a tuple of shapes in parentheses."""
    if not text.startswith("("):
        found = ARRAY.match(text)
        if found is None:
            raise ValueError(f"not a shape: {text[:80]!r}")
        space = re.search(r"S\((\d+)\)", found[3] or "")
        dims = tuple(int(size.removeprefix("<=")) for size in found[2].split(",") if size)
        return Array(found[1], dims, int(space[1]) if space else HBM)
    inside = re.sub(r"/\*.*?\*/", "", text[1:-1])
    parts, depth, begin = [], 0, 0
    for at, char in enumerate(inside + ","):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(inside[begin:at].strip())
            begin = at + 1
    return tuple(shape_of(part) for part in parts if part)


def bits_of(dtype: str) -> int:
    """Return the bits of one element."""
    size = re.match(r"[a-z]+(\d+)", dtype)
    return BITS[dtype] if dtype in BITS else int(size[1]) if size else 0


def _leaves(shape: Array | tuple) -> Iterator[Array]:
    if isinstance(shape, Array):
        yield shape
    else:
        for part in shape:
            yield from _leaves(part)


def _closing(text: str, at: int) -> int:
    """Return the index after the parenthesis that closes the one at `at`."""
    depth = 0
    for index in range(at, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index + 1
    raise ValueError(f"no closing parenthesis: {text[at : at + 80]!r}")
