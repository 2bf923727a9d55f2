"""The memory of an experiment: states and played agents, which no compiled program counts, and settings to lower."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from perfedrl.algorithms import unwrapped
from perfedrl.errors import UserError
from perfedrl.memory import LIMIT, Need, TooLargeError, estimate, size
from perfedrl.rollout import outline
from perfedrl.simulation.experiment import Experiment

COPIES = 3
"""Copies of a fleet's state that exist at a time: as it was drawn, stacked, and on the device."""

SMALLEST = 16
"""Axes shorter than this name no setting, since many settings have such small values."""


def need_of_states(experiment: Experiment, seeds: int) -> Need:
    """The memory of the states of all agents and of the server, for every seed."""
    server, client = jax.eval_shape(lambda: experiment.initial_states(0))
    own, shared = jax.tree.leaves(client), jax.tree.leaves(server)
    numbers = sum(map(size, own)) * experiment.fleet.agents + sum(map(size, shared))
    return Need(COPIES * seeds * numbers, max((x.shape for x in (*own, *shared)), key=math.prod))


def need_of_played_agent(experiment: Experiment) -> Need:
    """The memory of one agent that is played in Python, in a round and in an evaluation; agents take turns."""
    task, evaluation = experiment.fleet.task(0), experiment.evaluation
    episodes = evaluation.decisions(task) // (task.horizon + 1)

    def measured(key: Any) -> Any:
        return outline(task, experiment.policy).sample(None, key, episodes)

    return max(estimate(jax.make_jaxpr(f)(jax.random.key(0))) for f in (experiment.outlined_client(), measured))


@contextmanager
def name_settings(experiment: Experiment, seeds: int) -> Iterator[None]:
    """Add the settings to lower to the error that a program is too large; `seeds` is their number on a device."""
    try:
        yield
    except TooLargeError as error:
        lower = " or ".join(settings_to_lower(experiment, error.need.shape))
        beside = {"fewer seeds": seeds, "fewer agents at a time (chunk)": experiment.fleet.agents}
        counted = {way: count for way, count in beside.items() if count > 1 and count in error.need.shape}
        enough = error.need.bytes <= error.available * math.prod(counted.values())
        also = f", or run {' or '.join(counted)}" if enough else ""
        raise UserError(f"{error}; lower {lower}{also}; if you know that it fits, set {LIMIT} to more GiB") from error


def settings_to_lower(experiment: Experiment, shape: Sequence[int]) -> list[str]:
    """The settings that make the two longest axes of an array so long, such as "m_in (1000000)"."""
    fleet, evaluation = experiment.fleet, experiment.evaluation
    parts = [unwrapped(experiment.algorithm), experiment.policy]
    if evaluation.decisions(fleet.train):  # an exact evaluation samples nothing
        parts.append(evaluation)
    known: dict[str, tuple[int, ...]] = {"horizon": (fleet.train.horizon, fleet.train.horizon + 1)}
    for part in parts:
        if dataclasses.is_dataclass(part):
            known |= {field.name: numbers(getattr(part, field.name)) for field in dataclasses.fields(part)}
    longest = sorted({length for length in shape if length >= SMALLEST}, reverse=True)[:2]
    found = {name: length for length in longest for name, lengths in known.items() if length in lengths}
    shown = [f"{name} ({fleet.train.horizon if name == 'horizon' else n})" for name, n in found.items()]
    return shown or ["the sizes of batches, the horizon or the policy's width"]


def numbers(value: Any) -> tuple[int, ...]:
    """The whole numbers that a setting consists of."""
    items = value if isinstance(value, tuple) else (value,)
    return tuple(x for x in items if isinstance(x, int) and not isinstance(x, bool))
