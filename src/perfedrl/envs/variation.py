"""Variation within a fleet: which parameters vary, and which value each agent gets.

The notation is the same for every family, in Python and in a config:

- `length = [0.1, 0.9]`, or `{uniform = [0.1, 0.9]}`: every agent draws its own value;
- `gain = {plus_minus = [0.5, 1.5]}`: a size in this range and a sign for every agent, half of them negative;
- `length = {list = [0.1, 0.5, 0.9]}`, or three values and more: values are assigned in a random order, to training
  agents first, and repeat where there are more agents than values;
- `length = {train = [0.1, 0.9], held_out = [0.5]}`: the value of every agent;
- `vary = "length"`, or a list of names: each in the usual range of the literature, where the family has one.
"""

import numbers
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from perfedrl.errors import UserError, nearest

Vary = str | Sequence[str] | Mapping[str, Any]
"""The parameters that vary: their names, or a table from names to variations."""

Values = dict[str, Any]
"""The varying parameters of one agent."""

FORMS = (
    "a range [low, high], {uniform = [low, high]}, {plus_minus = [low, high]}, {list = [...]} or "
    "{train = [...], held_out = [...]}"
)


class Split(NamedTuple):
    """The parameters of every training agent and of every held-out one."""

    train: list[Values]
    held_out: list[Values]


def vary_agents(
    vary: Vary,
    agents: int,
    held_out: int,
    seed: int,
    known: Iterable[str] | None = None,
    ranges: Mapping[str, Any] | None = None,
) -> Split:
    """Draw every agent's values; a held-out agent equals no training agent and no other held-out agent.

    `known` are the family's parameters, where they are known before it is built; `ranges` are the variations for which
    a name alone stands.
    """
    if agents < 1 or held_out < 0:
        raise UserError(f"a fleet needs agents >= 1 and held_out >= 0; they are {agents} and {held_out}")
    chosen = usual(vary, ranges or {})
    for name in chosen:
        if known is not None and name not in (names := list(known)):
            raise UserError(f"vary: there is no parameter {name!r}{nearest(name, names)}")
    drawn = {name: draw(name, how, agents, held_out, seed) for name, how in chosen.items()}
    values = [{name: x[i] for name, x in drawn.items()} for i in range(agents + held_out)]
    check_distinct(values[:agents], values[agents:])
    return Split(values[:agents], values[agents:])


def usual(vary: Vary, ranges: Mapping[str, Any]) -> Mapping[str, Any]:
    """Expand names alone to their usual ranges."""
    if isinstance(vary, Mapping):
        return vary
    names = [vary] if isinstance(vary, str) else list(vary)
    for name in names:
        if not isinstance(name, str) or name not in ranges:
            raise UserError(f"vary: no usual range is known of {name!r}{nearest(str(name), ranges)}; give it {FORMS}")
    return {name: ranges[name] for name in names}


def draw(name: str, how: Any, agents: int, held_out: int, seed: int) -> list[Any]:
    """Draw one parameter's value for every agent, training agents first.

    Each parameter has random numbers of its own, so that varying another one does not change its values.
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    kind, content = form(name, how)
    if kind == "uniform":
        low, high = content
        return [float(x) for x in rng.uniform(low, high, agents + held_out)]
    if kind == "plus_minus":
        low, high = content
        drawn = rng.uniform(low, high, agents + held_out)
        signs = [sign for count in (agents, held_out) for sign in rng.permutation(np.resize([1, -1], count))]
        return [float(sign * size) for sign, size in zip(signs, drawn, strict=True)]
    if kind == "list":
        order = rng.permutation(len(content))
        turns = [*np.resize(order, agents), *np.resize(np.roll(order, -agents), held_out)]
        return [content[i] for i in turns]
    for part, count in (("train", agents), ("held_out", held_out)):
        if len(content[part]) != count:
            raise UserError(f"vary: {name} has {len(content[part])} values for {part}, and {count} such agents")
    return [*content["train"], *content["held_out"]]


def form(name: str, how: Any) -> tuple[str, Any]:
    """Parse a variation: its kind and its content."""
    if isinstance(how, Mapping):
        if set(how) in ({"train"}, {"train", "held_out"}):
            table = {"train": how["train"], "held_out": how.get("held_out", ())}
            if all(isinstance(x, Sequence) and not isinstance(x, str) for x in table.values()):
                return "table", table
        elif len(how) == 1 and next(iter(how)) in ("uniform", "plus_minus", "list"):
            kind, content = next(iter(how.items()))
            if kind == "plus_minus":
                return kind, sizes(name, content)
            return (kind, bounds(name, content)) if kind == "uniform" else (kind, distinct(name, content))
    elif isinstance(how, Sequence) and not isinstance(how, str):
        pair = len(how) == 2 and all(isinstance(x, numbers.Real) for x in how)
        return ("uniform", bounds(name, how)) if pair else ("list", distinct(name, how))
    raise UserError(f"vary: {name} = {how!r}; it must be {FORMS}")


def bounds(name: str, content: Any) -> tuple[float, float]:
    """Parse a range [low, high]."""

    def number(x):
        return isinstance(x, numbers.Real) and not isinstance(x, bool) and np.isfinite(float(x))

    pair = isinstance(content, Sequence) and len(content) == 2 and all(number(x) for x in content)
    if not pair or not content[0] < content[1]:
        raise UserError(f"vary: {name} needs a range [low, high] with low < high; it has {content!r}")
    return float(content[0]), float(content[1])


def sizes(name: str, content: Any) -> tuple[float, float]:
    """Parse a range of sizes [low, high]."""
    low, high = bounds(name, content)
    if low < 0:
        raise UserError(f"vary: {name} needs sizes >= 0, which take either sign; it has {content!r}")
    return low, high


def distinct(name: str, content: Any) -> list[Any]:
    """Parse a list of values and drop duplicates."""
    if not isinstance(content, Sequence) or isinstance(content, str) or not content:
        raise UserError(f"vary: {name} needs a list of values; it has {content!r}")
    return list({repr(x): x for x in content}.values())


def check_distinct(train: list[Values], held_out: list[Values]) -> None:
    """Reject held-out agents that equal a training agent or each other."""
    seen, unseen = {repr(x) for x in train}, {repr(x) for x in held_out}
    left = len(unseen - seen)
    if left < len(held_out):
        raise UserError(
            f"held_out asks for {len(held_out)} agents unlike all others, and {left} distinct tasks are left when "
            f"{len(train)} agents train: vary more parameters, or hold out fewer agents"
        )
