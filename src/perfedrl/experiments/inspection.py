"""What a config describes, before anything is trained: its agents, what tells them apart, and one of their episodes."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from perfedrl.envs import Fleet
from perfedrl.envs.base import DataTask, PlayedTask
from perfedrl.errors import UserError
from perfedrl.experiments.config import Config
from perfedrl.registry import abbreviated
from perfedrl.rollout import sampler
from perfedrl.simulation.keys import start_key
from perfedrl.types import Params, Trajectory

MANY = 9
"""Numbers that a table still shows; of longer arrays it says how long they are."""


@dataclass(frozen=True)
class Inspection:
    """A config's fleet: what all agents share, what each has of its own, and what a round costs each."""

    shared: dict[str, str]
    own: list[dict[str, str]]
    """Agent by agent, training agents first."""
    agents: int
    parameters: int
    trajectories: int
    bytes: int


def inspect(config: Config) -> Inspection:
    """Build what a config describes and look at it; nothing is trained."""
    experiment = config.experiment
    params = jax.eval_shape(experiment.policy.init, jax.random.key(0))
    shared, own = described(experiment.fleet)
    return Inspection(
        shared,
        own,
        experiment.fleet.agents,
        sum(x.size for x in jax.tree.leaves(params)),
        experiment.algorithm.trajectories_per_round,
        experiment.bytes_per_round,
    )


def described(fleet: Fleet) -> tuple[dict[str, str], list[dict[str, str]]]:
    """What all agents share, and what each has of its own, by name."""
    every = [fleet.task(i) for i in range(fleet.agents)]
    every += [fleet.task(i, held_out=True) for i in range(fleet.held_out_agents)]
    facts = [task.settings for task in every]
    same = lambda name: all(name in each and np.array_equal(facts[0][name], each[name]) for each in facts)  # noqa: E731
    alike = {name for name in facts[0] if same(name)}
    general = {"horizon": every[0].horizon, "discount": every[0].discount}
    first = every[0]
    spaces = {"actions": first.actions, "action_size": first.action_size, "observation_size": first.observation_size}
    general |= {name: size for name, size in spaces.items() if size is not None}
    shared = general | {name: facts[0][name] for name in facts[0] if name in alike}
    own = [{name: plain(each.get(name)) for name in facts[0] if name not in alike} for each in facts]
    return {name: plain(x) for name, x in shared.items()}, own


def plain(value: Any) -> str:
    """A setting as a table shows it."""
    if not isinstance(value, np.ndarray | float | np.floating):
        return abbreviated(value)
    array = np.asarray(value)
    if array.size > MANY:
        return f"{' x '.join(map(str, array.shape))} numbers"
    text = np.array2string(array, precision=4, separator=", ", suppress_small=True).replace("\n", "")
    return text if array.ndim else f"{array:.4g}"


def episode(config: Config, agent: int) -> tuple[Any, Params, Trajectory | None]:
    """An agent's task, the parameters that training starts from, and an episode of the agent under them, if any."""
    fleet, policy = config.experiment.fleet, config.experiment.policy
    count = fleet.agents + fleet.held_out_agents
    if not 0 <= agent < count:
        raise UserError(f"there is no agent {agent}: the fleet has {count}, numbered from 0, training agents first")
    held_out = agent >= fleet.agents
    task = fleet.task(agent - fleet.agents if held_out else agent, held_out=held_out)
    params = policy.init(start_key(config.experiment.start_number(seed=0)))
    if isinstance(task, DataTask):
        return task, params, None
    play = partial(sampler(task, policy).sample, m=1)
    batch = (play if isinstance(task, PlayedTask) else jax.jit(play))(params, jax.random.key(agent))
    return task, params, jax.tree.map(lambda x: np.asarray(x)[0], batch)
