"""The memory that a compiled program needs, estimated from its shapes before it is compiled.

A traced program is a list of operations on arrays whose shapes are known. The estimate goes through the list and adds
up the arrays that are alive at each operation; the largest sum, plus the program's arguments, is the estimate. Four
rules stand for what the compiler does:

- An elementwise operation takes no memory if its result is used once, by an elementwise operation or a reduction,
  since the compiler fuses the two. Broadcasts, reshapes and slices that only such operations use take none either.
- An array lives until its last use; the arguments and the results live throughout.
- A loop takes the memory of one pass through its body, beside what it carries and collects. So agents that run one
  after the other, in chunks, or in slices of a batch count once; agents and seeds side by side count all.
- Devices that share one memory, as the cores of a CPU do, add up.

The limit is the memory of the machine or the GPU, or what the environment variable in `LIMIT` says. Whoever builds and
compiles for somebody else, as an agent does for a server, sets limits of its own by `within`: on memory, on the states
of a table, and on the operations of a program, since a compiler cannot be stopped, and its time grows with them.
`benchmarks/bench_memory.py` compares the estimate with the compiler's own count: on a CPU it is 0.4 to 1.5 times the
count for the configs in `configs/`, but for programs of a few KiB.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from perfedrl.errors import UserError

LIMIT = "PERFEDRL_MEMORY"
"""The environment variable that sets the limit, in GiB, in place of the memory of the machine or the GPU."""

VIEWS = {"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "iota"}
VIEWS |= {"reshape", "slice", "squeeze", "transpose"}
"""Operations that only move or repeat the elements of an array."""

MIXES = ("cholesky", "conv_", "cum", "dot", "dynamic", "fft", "gather", "lu", "random", "scatter", "sort", "triangular")
"""Beginnings of the names of operations whose elements depend on several elements of an operand of the same shape."""

CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat"}
"""Operations that stand for the program they contain."""


class Need(NamedTuple):
    """The estimated memory of a program in bytes, and the shape of its largest array."""

    bytes: float
    shape: tuple[int, ...]


def need_of(tree: Any) -> Need:
    """The memory of the arrays in a tree, which may be their shapes alone."""
    leaves = jax.tree.leaves(tree)
    largest = max(leaves, key=lambda x: math.prod(x.shape), default=None)
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
    return Need(size, () if largest is None else tuple(largest.shape))


class SizeLimits(NamedTuple):
    """The most that is built and compiled: bytes of memory, states of a table, and operations of a program."""

    memory: float
    states: int
    operations: int
    whose: str = "this agent's"


class TooLargeError(UserError):
    """Raised if something needs more memory than there is, or than is allowed."""

    def __init__(self, need: Need, available: float, where: str):
        self.need, self.available = need, available
        super().__init__(
            f"this needs about {readable(need.bytes)} of memory, and {where} {readable(available)}; the largest "
            f"array has shape {' x '.join(map(str, need.shape))}"
        )


_LIMITS: ContextVar[SizeLimits | None] = ContextVar("size_limits", default=None)


@contextmanager
def within(limits: SizeLimits) -> Iterator[None]:
    """Reject what is larger than some limits, in this thread."""
    before = _LIMITS.set(limits)
    try:
        yield
    finally:
        _LIMITS.reset(before)


def check_states(states: int) -> None:
    """Reject a table of more states than the limit in force, if there is one."""
    limits = _LIMITS.get()
    if limits is not None and states > limits.states:
        raise UserError(f"it has {states} states; {limits.whose} limit is states = {limits.states}")


def check_operations(traced: ClosedJaxpr) -> None:
    """Reject a program of more operations than the limit in force, if there is one, before it is compiled."""
    limits = _LIMITS.get()
    if limits is not None and (count := operations(traced.jaxpr)) > limits.operations:
        raise UserError(
            f"its program has {count} operations to be compiled; {limits.whose} limit is operations = "
            f"{limits.operations}"
        )


def operations(jaxpr: Jaxpr) -> int:
    """The number of operations that are compiled; those of a loop count once."""
    return sum(1 + sum(map(operations, inner_jaxprs(equation.params))) for equation in jaxpr.eqns)


def check_own_limit(need: Need) -> None:
    """Reject what needs more memory than the limit in force, if there is one."""
    limits = _LIMITS.get()
    if limits is not None and need.bytes > limits.memory:
        raise TooLargeError(need, limits.memory, f"{limits.whose} limit memory is")


def check_memory(need: Need) -> None:
    """Reject a program that does not fit into the memory of the GPU, or of the machine where there is none."""
    check_own_limit(need)
    stats = None if jax.default_backend() == "cpu" else jax.local_devices()[0].memory_stats()
    if stats is None or LIMIT in os.environ:
        check_host_memory(need)
    elif need.bytes > stats["bytes_limit"]:
        raise TooLargeError(need, stats["bytes_limit"], f"the device {jax.local_devices()[0].device_kind} has")


def check_host_memory(need: Need) -> None:
    """Reject arrays that do not fit into the memory of the machine."""
    check_own_limit(need)
    available = chosen_limit() or machine_memory()
    if need.bytes > available:
        raise TooLargeError(need, available, "this machine has")


def chosen_limit() -> float | None:
    """The limit in bytes that the user has set, if any."""
    value = os.environ.get(LIMIT)
    if value is None:
        return None
    with suppress(ValueError):
        if float(value) > 0:
            return float(value) * 2**30
    raise UserError(f"{LIMIT} must be a number of GiB, such as 16, got {value!r}")


@lru_cache
def machine_memory() -> float:
    """The physical memory of the machine, or the limit of its container, in bytes; infinite where it is not known."""
    found = math.inf
    with suppress(ValueError, OSError, AttributeError):  # Windows has no sysconf
        found = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(ValueError, OSError):  # no container, or no limit, which reads "max"
            found = min(found, float(int(Path(file).read_text())))
    return found


def readable(count: float) -> str:
    """A number of bytes as text, such as "3.2 GiB"."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    step = min(int(math.log2(max(count, 1)) // 10), len(units) - 1)
    return f"{count / 2 ** (10 * step):.3g} {units[step]}"


def estimate(traced: ClosedJaxpr) -> Need:
    """Estimate the memory that a traced program takes, its arguments included; each program is estimated once."""
    if traced not in _ESTIMATES:
        program = Program(traced.jaxpr)
        inside, arguments = program.peak(), [program.avals[x] for x in program.inputs]
        shapes = [inside.shape, *(aval.shape for aval in arguments)]
        _ESTIMATES[traced] = Need(sum(map(size, arguments)) + inside.bytes, max(shapes, key=math.prod))
    return _ESTIMATES[traced]


_ESTIMATES: WeakKeyDictionary[ClosedJaxpr, Need] = WeakKeyDictionary()


class Operation(NamedTuple):
    """An operation of a program; arrays are numbers, and `inner` are the programs that it runs, such as a loop's."""

    name: str
    inputs: list[int]
    outputs: list[int]
    inner: list[Jaxpr]
    copies: int
    """The number of devices that run the inner programs at once in one memory."""


class Program:
    """A jaxpr as a list of operations, in which the calls of other jaxprs are written out."""

    def __init__(self, jaxpr: Jaxpr):
        self.avals: list[Any] = []
        self.operations: list[Operation] = []
        own = (*jaxpr.invars, *jaxpr.constvars)
        self.inputs = [self._new(variable.aval) for variable in own]
        self.outputs = self._write_out(jaxpr, dict(zip(own, self.inputs, strict=True)))

    def _new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _write_out(self, jaxpr: Jaxpr, numbers: dict[Any, int]) -> list[int]:
        """Append the operations of a jaxpr, given the numbers of its arguments; return those of its results."""

        def number(atom: Any) -> int:
            return self._new(atom.aval) if isinstance(atom, Literal) else numbers[atom]

        for equation in jaxpr.eqns:
            name, inner = equation.primitive.name, list(inner_jaxprs(equation.params))
            inputs = [number(atom) for atom in equation.invars]
            if name in CALLS and len(inner) == 1 and len(inner[0].invars) == len(inputs) and not inner[0].constvars:
                outputs = self._write_out(inner[0], dict(zip(inner[0].invars, inputs, strict=True)))
            else:
                outputs = [self._new(variable.aval) for variable in equation.outvars]
                self.operations.append(Operation(name, inputs, outputs, inner, copies(equation.params)))
            numbers.update(zip(equation.outvars, outputs, strict=True))
        return [number(atom) for atom in jaxpr.outvars]

    def peak(self) -> Need:
        """The most memory that intermediate and final results take at a time, and the shape of the largest of them."""
        last_use, alive, best = self._last_uses(), 0.0, Need(0, ())
        ending: dict[int, float] = defaultdict(float)
        for i, operation in enumerate(self.operations):
            made = [x for x in operation.outputs if x in last_use]
            for x in made:
                alive += size(self.avals[x])
                ending[last_use[x]] += size(self.avals[x])
            inner = max((Program(jaxpr).peak() for jaxpr in operation.inner), default=Need(0, ()))
            shapes = [best.shape, inner.shape, *(self.avals[x].shape for x in made)]
            best = Need(max(best.bytes, alive + inner.bytes * operation.copies), max(shapes, key=math.prod))
            alive -= ending.pop(i, 0.0)
        return best

    def _last_uses(self) -> dict[int, int]:
        """For each array that takes memory: the position of the last operation that needs it."""
        users: dict[int, list[Operation]] = defaultdict(list)
        for operation in self.operations:
            for x in operation.inputs:
                users[x].append(operation)
        last, fused = dict.fromkeys(self.outputs, len(self.operations)), set()
        for i, operation in reversed(list(enumerate(self.operations))):
            used = [x for x in operation.outputs if x in last]
            if not used:
                continue  # the compiler drops it
            position = i
            if used[0] not in self.outputs and self._is_fused(operation, users[used[0]]):
                fused.add(used[0])
                position = last[used[0]]
            for x in operation.inputs:
                last[x] = max(last.get(x, 0), position)
        return {x: position for x, position in last.items() if x not in fused}

    def _is_fused(self, operation: Operation, users: list[Operation]) -> bool:
        """Whether the compiler computes an operation as a part of the operations that use its result."""
        alone = operation.name in VIEWS or (len(users) == 1 and self._is_elementwise(operation))
        return alone and all(
            user.name in VIEWS or user.name.startswith(("reduce_", "arg")) or self._is_elementwise(user)
            for user in users
        )

    def _is_elementwise(self, operation: Operation) -> bool:
        """Whether every element of the only result depends on the same element of the operands."""
        if operation.inner or len(operation.outputs) > 1 or operation.name.startswith(MIXES):
            return False
        shape = self.avals[operation.outputs[0]].shape
        return all(repeats_to(self.avals[x].shape, shape) for x in operation.inputs)


def repeats_to(operand: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an operand has a shape, or is repeated along some of its axes to have it."""
    fits = (own in (1, length) for own, length in zip(operand, shape, strict=False))
    return not operand or (len(operand) == len(shape) and all(fits))


def size(aval: Any) -> int:
    """The bytes of an array."""
    return math.prod(aval.shape) * aval.dtype.itemsize


def inner_jaxprs(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    """The programs among the parameters of an operation."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def copies(params: Mapping[str, Any]) -> int:
    """The number of devices that run the programs of an operation at once in one memory."""
    return params["mesh"].size if "mesh" in params and jax.default_backend() == "cpu" else 1
