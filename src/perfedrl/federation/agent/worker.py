"""An agent at work: the server's plan and the agent's own environment make the functions that a round calls."""

import secrets
import time
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from perfedrl.algorithms import Algorithm, Private, privatize
from perfedrl.algorithms.wrapper import Wrapper, agent_side
from perfedrl.compilation import jit
from perfedrl.errors import UserError
from perfedrl.experiments.config import Config, whole
from perfedrl.experiments.files import named_leaves
from perfedrl.federation.agent.compiled_work import Compiled, Live
from perfedrl.federation.agent.config import AgentConfig, check_number, read_plan
from perfedrl.simulation.compiled import EVALUATION
from perfedrl.simulation.simulator import Simulation
from perfedrl.types import Params

OWN = 2**30
"""Folded, with the draw, into an agent's key when it personalizes: above training's rounds and below evaluation's."""

MOST_PLANS = 4
"""Plans whose programs are kept."""

Tensors = dict[str, np.ndarray]


class Measured(NamedTuple):
    """An agent's outcomes, "return" and what else its task says, under the shared parameters and under its own."""

    before: dict[str, float]
    after: dict[str, float]


class Worker:
    """One agent of a federation, by its environment and its number there."""

    def __init__(self, config: AgentConfig, number: int):
        self.config, self.number = config, check_number(number)
        if not config.makes_sampler:
            config.tasks(number)
        self._plans: OrderedDict[str, Work] = OrderedDict()

    def work(self, plan: str) -> "Work":
        """What the agent does for a plan, a config as TOML; of the last few plans it is kept."""
        if plan not in self._plans:
            self._plans[plan] = Work(read_plan(plan, self.config), self.config, self.number)
        self._plans.move_to_end(plan)
        while len(self._plans) > MOST_PLANS:
            self._plans.popitem(last=False)
        return self._plans[plan]


class Work:
    """One plan at one agent, within the agent's limits. Trees go in and come out as NumPy arrays.

    `message` shows what a message looks like, `state` is where the agent starts.
    """

    def __init__(self, config: Config, agent: AgentConfig, number: int):
        parts = config.parts
        self.config, self.limits, self.number = config, agent.limits, number
        self.algorithm, self.private = agent_side(parts.algorithm), privacy_of(parts.algorithm)
        whole_fleet = Simulation(
            parts.fleet, parts.policy, [self.algorithm], config.seeds, parts.agent, start_key=config.start
        )
        start = whole_fleet.start()
        self.message = jax.tree.map(lambda x: x[0], start.server.message)
        self.state = jax.tree.map(lambda x: x[0, 0], start.clients)
        self._hand: Any = (Live if agent.samples_in_python else Compiled)(config, agent, self.algorithm, number)

    @property
    def trajectories(self) -> int:
        """What one round costs."""
        return self.algorithm.trajectories_per_round

    def prepare(self) -> None:
        """Compile what a round and an evaluation call, where that can be done beforehand."""
        for program in (self._hand.train, self._hand.measure):
            program.prepare(self.message, self.state)

    def update(self, message: PyTree, state: PyTree, round_: int) -> tuple[PyTree, PyTree]:
        """One round's upload, and the agent's new state.

        Where the plan is private, the upload is clipped and noised with a key that nobody else has, and nobody learns
        whether training diverged: the agent then sends noise around the message and keeps its state.
        """
        check_finite(message, "the message")
        upload, after = self._timed(self._hand.train, message, state, round_)
        if self.private is None:
            check_finite((upload, after), f"what the agent learned in round {round_}", ": lower alpha or beta")
            return upload, after
        key = jax.random.wrap_key_data(jnp.asarray(np.frombuffer(secrets.token_bytes(8), np.uint32)))
        upload = _privatize(
            self.algorithm.unchanged_upload(message), upload, self.private.clip, self.private.noise, key
        )
        return jax.tree.map(np.asarray, upload), after if finite(after) else state

    def evaluate(self, message: PyTree, state: PyTree, round_: int) -> Measured:
        """What the agent's parameters are worth after so many rounds, as the simulator measures it."""
        check_finite(message, "the message")
        self._check_episodes()
        return as_measured(self._timed(self._hand.measure, message, state, EVALUATION + round_))

    def personalize(self, message: PyTree, state: PyTree, m: int, draw: int = 0) -> tuple[Params, Measured]:
        """The agent's own parameters from m trajectories, and what they are worth; another draw for other ones."""
        for name, value, most in (("m", m, self.limits.trajectories_per_round), ("draw", draw, OWN - 1)):
            if not whole(value) or not 0 <= value <= most:
                raise UserError(f"{name} must be a whole number from 0 to {most}; it is {value!r}")
        check_finite(message, "the message")
        self._check_episodes()
        own = self._timed(self._hand.own(m), message, state, OWN + draw)
        check_finite(own, "the agent's own parameters", ": lower alpha")
        start = self.algorithm.shared(self.algorithm.with_personal_part(message, state))
        both = jax.tree.map(np.asarray, start), own
        return own, as_measured(self._timed(self._hand.worth, both, state, OWN + draw))

    def _check_episodes(self) -> None:
        needed, most = self._hand.episodes, self.limits.episodes
        if needed > most:
            raise UserError(
                f"the plan's evaluation takes {needed} episodes of an agent; this agent's limit is {most}: "
                "the plan needs fewer trajectories and episodes under [evaluation]"
            )

    def _timed(self, program: Any, message: PyTree, state: PyTree, moment: int) -> Any:
        """Call a program within the agent's time; compiling it does not count."""
        program.prepare(message, state)
        limit, begun = self.limits.seconds, time.monotonic()
        self._hand.start(begun + limit)
        result = program(message, state, moment)
        if (took := time.monotonic() - begun) > limit:
            raise UserError(f"the agent took {took:.1f} s; its limit is {limit:g} s for one request")
        return result


def privacy_of(algorithm: Algorithm) -> Private | None:
    """The layer of an algorithm that protects its uploads, if there is one."""
    while isinstance(algorithm, Wrapper):
        if isinstance(algorithm, Private):
            return algorithm
        algorithm = algorithm.inner
    return None


def unnamed(like: PyTree, tensors: Tensors, what: str) -> PyTree:
    """The tree that named tensors make; it must be like another in names, types and shapes."""
    expected = named_leaves(like)
    for name in (*expected, *tensors):
        if name not in tensors or name not in expected:
            raise UserError(f"{what} {'lacks' if name in expected else 'has an unknown'} tensor {name!r}")
    for name, x in expected.items():
        came = tensors[name]
        if (came.dtype, came.shape) != (x.dtype, x.shape):
            raise UserError(
                f"{what} has {name!r} as {came.dtype}{list(came.shape)}; it must be {x.dtype}{list(x.shape)}"
            )
    return jax.tree.unflatten(jax.tree.structure(like), [tensors[name] for name in expected])


def finite(tree: PyTree) -> bool:
    return all(np.isfinite(x).all() for x in jax.tree.leaves(tree))


def check_finite(tree: PyTree, what: str, advice: str = "") -> None:
    if not finite(tree):
        raise UserError(f"{what} is not finite{advice}")


def as_measured(outcomes: dict[str, dict[str, Any]]) -> Measured:
    """Outcomes as plain numbers."""
    return Measured(**{when: {name: float(x) for name, x in named.items()} for when, named in outcomes.items()})


_privatize = jit(privatize)
