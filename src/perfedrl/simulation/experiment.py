"""The experiment: everything that a run is made of, checked once and passed whole to every engine and command."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from perfedrl.algorithms import Algorithm, ServerState
from perfedrl.algorithms.checks import agents_per_round, check_agents, check_algorithm
from perfedrl.envs import Fleet
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, Sampled
from perfedrl.exact.tabular import Exact
from perfedrl.simulation.evaluation import auto, exact
from perfedrl.simulation.keys import start_key
from perfedrl.types import Params

PER_SEED: Literal["per-seed"] = "per-seed"
"""The value of `start` that gives every seed its own initial parameters."""


@dataclass(frozen=True, eq=False)
class StartParameters:
    """Parameters to start from, such as those of another run: one set for each of `seeds`, or one for all seeds.

    `params` have a leading axis of seeds; `source` says where they are from.
    """

    source: str
    seeds: tuple[int, ...]
    params: Params

    def row(self, seed: int) -> int:
        """The position of a seed's parameters."""
        if len(self.seeds) == 1:
            return 0
        if seed not in self.seeds:
            known = ", ".join(map(str, self.seeds))
            raise UserError(f"seed {seed} cannot start from {self.source}, which has the seeds {known}; use those")
        return self.seeds.index(seed)


@dataclass(frozen=True, eq=False)
class Experiment:
    """A fleet, a policy and an algorithm, with the estimators, the evaluation and the participation of agents.

    `agent` turns a task into the objective that an algorithm uses: `Sampled(policy)` by default. With `Exact(policy)`
    gradients and curvature are exact, in float64, for training without sampling noise. `evaluation` is by default exact
    where that is possible. `weights` are the weights of the training agents in the server's mean, equal by default.
    `participation` is the share of the agents that participate in a round; participants are drawn for each round.
    `start` is the number from which the initial parameters of all seeds are drawn; "per-seed" draws them for each seed,
    and `StartParameters` are the initial parameters themselves.

    Use `dataclasses.replace` to change a part; a changed experiment is checked again.
    """

    fleet: Fleet
    policy: Any
    algorithm: Algorithm
    agent: Any = None
    evaluation: Any = None
    weights: Sequence[float] | None = None
    participation: float = 1.0
    start: int | str | StartParameters = 0

    def __post_init__(self) -> None:
        if self.start != PER_SEED and not isinstance(self.start, int | StartParameters):
            raise UserError(f'start must be a whole number or "{PER_SEED}", got {self.start!r}')
        check_algorithm(self.algorithm, type(self.algorithm).__name__)
        check_agents(self.algorithm, self.fleet.agents, self.weights)
        agents_per_round(self.algorithm, self.fleet.agents, self.participation, self.weights)
        self.algorithm.check_supports(self.fleet, self.policy)
        if isinstance(self.agent, Exact):
            exact(self.fleet, Sampled(self.policy))
        if self.agent is None:
            object.__setattr__(self, "agent", Sampled(self.policy))
        if self.evaluation is None:
            sampled = self.agent if isinstance(self.agent, Sampled) else Sampled(self.policy)
            object.__setattr__(self, "evaluation", auto(self.fleet, sampled))

    @cached_property
    def participants(self) -> int:
        """The number of participants in a round."""
        return agents_per_round(self.algorithm, self.fleet.agents, self.participation, self.weights)

    @property
    def precision(self) -> AbstractContextManager:
        """The context to compute in: float64 where gradients are exact."""
        return jax.enable_x64(True) if isinstance(self.agent, Exact) else nullcontext()

    def start_number(self, seed: int) -> int:
        """The number from which a seed's start parameters are drawn; of `StartParameters`, the row of this seed."""
        if isinstance(self.start, StartParameters):
            return self.start.row(seed)
        return int(seed) if self.start == PER_SEED else int(self.start)

    def start_params(self, number: int) -> Params:
        """The start parameters that are drawn from `number`; of `StartParameters`, those in this row."""
        if isinstance(self.start, StartParameters):
            return jax.tree.map(lambda x: jnp.asarray(x[number]), self.start.params)
        return self.policy.init(start_key(number))

    def initial_states(self, number: int) -> tuple[ServerState, PyTree]:
        """The server's and a client's first state, from the start parameters of `number`."""
        return self._fitted_algorithm.init(self.start_params(number))

    @cached_property
    def _fitted_algorithm(self) -> Algorithm:
        """The algorithm whose first client states fit the agents."""
        return self.algorithm.fitted_to(self.outlined_agent)

    @property
    def outlined_agent(self) -> Objective:
        """The first agent for its shapes: JAX can trace it, and trajectories that JAX cannot sample are made up."""
        task = self.fleet.task(0)
        return self.agent.outline(task) if isinstance(self.agent, Sampled) else self.agent(task)

    @cached_property
    def bytes_per_round(self) -> int:
        """The bytes that one agent receives and sends in a round; 0 where agents send nothing."""
        with self.precision:
            message = jax.eval_shape(lambda: self.initial_states(0)[0].message)
            upload, _ = jax.eval_shape(self.outlined_client(), jax.random.key(0))
        crossing = jax.tree.leaves((message, upload)) if jax.tree.leaves(upload) else []
        return sum(x.size * x.dtype.itemsize for x in crossing)

    def outlined_client(self) -> Callable[[PRNGKeyArray], tuple[PyTree, PyTree]]:
        """One agent's work in the first round as a function of its key, for its shapes: episodes are made up."""
        agent = self.outlined_agent

        def work(key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
            server, client = self.initial_states(0)
            return self.algorithm.client(server.message, client, agent, key)

        return work

    def cost_after(self, rounds: int) -> dict[str, np.ndarray]:
        """Mean cumulative cost per agent after `rounds` rounds, in trajectories and bytes, rounded.

        Agents that are not drawn for a round pay nothing for it.
        """

        def mean(cost: float) -> np.ndarray:
            return np.asarray([round(cost * self.participants / self.fleet.agents)])

        return {
            "trajectories": mean(self.algorithm.trajectories_after(rounds)),
            "bytes": mean(rounds * self.bytes_per_round),
        }


AgentFactory = Callable[[Any], Objective]
"""Turns a task into what an algorithm sees of it."""
