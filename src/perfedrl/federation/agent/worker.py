"""An agent's local training for a run: the server's plan and the agent's own environment."""

import logging
import time
from collections import OrderedDict
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from perfedrl.algorithms import Algorithm, Private, privatize
from perfedrl.algorithms.wrapper import Wrapper, agent_side, shapes
from perfedrl.compilation import jit
from perfedrl.envs import PlayedTask
from perfedrl.errors import FAILURES, UserError, in_one_line
from perfedrl.experiments.config import Config, whole
from perfedrl.experiments.files import named_leaves
from perfedrl.federation.agent.config import AgentConfig, check_number, read_plan
from perfedrl.federation.agent.discrete_gaussian import ExactRandom
from perfedrl.federation.agent.local_computation import CompiledComputation, PythonComputation
from perfedrl.federation.agent.private_release import check_noise, noised_upload
from perfedrl.key_domains import EVALUATION
from perfedrl.memory import check_own_limit, need_of, within
from perfedrl.types import Params

log = logging.getLogger("perfedrl")

OWN = 2**30
"""Folded, with the draw, into an agent's key when it personalizes: above training's rounds and below evaluation's."""

MOST_PLANS = 4
"""The number of plans whose compiled functions are kept."""

Tensors = dict[str, np.ndarray]


class AgentOutcomes(NamedTuple):
    """An agent's outcomes, "return" and those of its task, under the shared parameters and under its own."""

    before: dict[str, float]
    after: dict[str, float]


class Worker:
    """One agent of a federation, with its environment, which is checked, and its number."""

    def __init__(self, config: AgentConfig, number: int):
        self.config, self.number = config, check_number(number)
        tasks = None if config.makes_sampler else config.tasks(number)
        if isinstance(tasks, PlayedTask):
            for warning in tasks.check():
                log.warning("%s", warning)
        # Read once: an environment is opened for it, and later another one may be open, of which there may be just one.
        self.environment_spaces = config.environment_spaces(number)
        self._trainings: OrderedDict[str, LocalTraining] = OrderedDict()

    def training(self, plan: str) -> "LocalTraining":
        """The agent's training for a plan, a config as TOML; those of the last few plans are kept."""
        if plan not in self._trainings:
            self._trainings[plan] = LocalTraining(read_plan(plan, self.config, self.number), self.config, self.number)
        self._trainings.move_to_end(plan)
        while len(self._trainings) > MOST_PLANS:
            self._trainings.popitem(last=False)
        return self._trainings[plan]

    def close(self) -> None:
        """Close the environment if it is played in Python; it opens again on demand. A failure is only reported."""
        tasks = None if self.config.makes_sampler else self.config.tasks(self.number)
        try:
            if isinstance(tasks, PlayedTask):
                tasks.close()
        except FAILURES as error:
            log.warning("the environment of agent %d could not be closed: %s", self.number, in_one_line(error))


class LocalTraining:
    """One agent's part in one run, within the agent's limits. Trees go in and come out as NumPy arrays.

    `message` is an example of a message, `state` the agent's start state.
    """

    def __init__(self, config: Config, agent: AgentConfig, number: int):
        experiment = config.experiment
        self.config, self.limits, self.number = config, agent.limits, number
        self.algorithm, self.private = agent_side(experiment.algorithm), privacy_of(experiment.algorithm)
        if self.private is not None:
            check_noise(self.private.noise)
        own = replace(experiment, algorithm=self.algorithm)
        with within(agent.limits.sizes):
            start = own.start_number(config.seeds[0])
            check_own_limit(need_of(jax.eval_shape(lambda: own.initial_states(start))))
            server, client = own.initial_states(start)
        self.message, self.state = jax.tree.map(np.asarray, (server.message, client))
        computation = PythonComputation if agent.samples_in_python else CompiledComputation
        self._computation: Any = computation(config, agent, self.algorithm, number)

    @property
    def trajectories(self) -> int:
        """The number of trajectories that one round takes."""
        return self.algorithm.trajectories_per_round

    def trajectories_in(self, round_: int) -> int:
        """The number of trajectories that a round takes, where rounds differ."""
        after = self.algorithm.trajectories_after
        return after(round_ + 1) - after(round_)

    @property
    def mean_return(self) -> float | None:
        """The mean return of the episodes of the last request, where they are played in Python."""
        return self._computation.mean_return

    @property
    def failed_episodes(self) -> int:
        """The number of episodes of the last request that failed and were drawn again, where they are counted."""
        return self._computation.failed_episodes

    def prepare(self) -> None:
        """Compile the functions of a round and of an evaluation, where they are compiled at all."""
        with within(self.limits.sizes):
            for function in (self._computation.train, self._computation.measure):
                function.prepare(self.message, self.state)

    def update(self, message: PyTree, state: PyTree, round_: int) -> tuple[PyTree, PyTree]:
        """Train for one round; return the upload and the agent's new state.

        In a private run the upload is clipped and noised with random numbers of the operating system. Whether training
        diverged stays secret too: the agent then sends noise around the message and keeps its state.
        """
        check_finite(message, "the message")
        upload, after = self._timed(self._computation.train, message, state, round_)
        if shapes(after) != shapes(state):
            raise UserError(
                "the agent's episodes have another length than the horizon of its fleet, so that it cannot keep them "
                "from round to round: set rounds_per_batch = 1"
            )
        if self.private is None:
            check_finite((upload, after), f"the agent's result of round {round_}", ": lower alpha or beta")
            return upload, after
        unchanged, clip, noise = self.algorithm.unchanged_upload(message), self.private.clip, self.private.noise
        if noise > 0:
            upload = noised_upload(unchanged, upload, clip, noise, ExactRandom())
        else:
            upload = _privatize(unchanged, upload, clip, noise, jax.random.key(0))
        return jax.tree.map(np.asarray, upload), after if finite(after) else state

    def evaluate(self, message: PyTree, state: PyTree, round_: int) -> AgentOutcomes:
        """The agent's outcomes before and after adaptation, as the simulator measures them after `round_` rounds."""
        check_finite(message, "the message")
        self._check_episodes()
        return as_outcomes(self._timed(self._computation.measure, message, state, EVALUATION + round_))

    def personalize(self, message: PyTree, state: PyTree, m: int, draw: int = 0) -> tuple[Params, AgentOutcomes]:
        """The agent's own parameters from m trajectories, and their outcomes; another `draw` samples other ones."""
        for name, value, most in (("m", m, self.limits.trajectories_per_round), ("draw", draw, OWN - 1)):
            if not whole(value) or not 0 <= value <= most:
                raise UserError(f"{name} must be a whole number from 0 to {most}, got {value!r}")
        check_finite(message, "the message")
        self._check_episodes()
        own = self._timed(self._computation.personalize(m), message, state, OWN + draw)
        check_finite(own, "the agent's own parameters", ": lower alpha")
        both = self.start(message, state), own
        return own, as_outcomes(self._timed(self._computation.compare, both, state, OWN + draw))

    def start(self, message: PyTree, state: PyTree) -> Params:
        """The parameters that the agent has before it adapts: the shared ones, with its personal ones if it has any."""
        return jax.tree.map(np.asarray, self.algorithm.shared(self.algorithm.with_personal_part(message, state)))

    def _check_episodes(self) -> None:
        needed, most = self._computation.episodes, self.limits.episodes
        if needed > most:
            raise UserError(
                f"the plan's evaluation takes {needed} episodes of an agent; this agent's limit is {most}: "
                "use fewer trajectories and episodes under [evaluation]"
            )

    def _timed(self, function: Any, message: PyTree, state: PyTree, moment: int) -> Any:
        """Call a function within the agent's limits; that on time does not include compilation."""
        with within(self.limits.sizes):
            function.prepare(message, state)
            limit, begun = self.limits.seconds, time.monotonic()
            self._computation.limit_time(begun + limit)
            result = function(message, state, moment)
        if (took := time.monotonic() - begun) > limit:
            raise UserError(f"the agent took {took:.1f} s for one request; its limit is {limit:g} s")
        return result


def privacy_of(algorithm: Algorithm) -> Private | None:
    """The wrapper of an algorithm that noises its uploads, if there is one."""
    while isinstance(algorithm, Wrapper):
        if isinstance(algorithm, Private):
            return algorithm
        algorithm = algorithm.inner
    return None


def unnamed(like: PyTree, tensors: Tensors, what: str) -> PyTree:
    """Build a tree from named tensors; names, types and shapes must be those of `like`."""
    expected = named_leaves(like)
    for name in (*expected, *tensors):
        if name not in tensors or name not in expected:
            raise UserError(f"{what} {'lacks' if name in expected else 'has an unknown'} tensor {name!r}")
    for name, x in expected.items():
        came = tensors[name]
        if (came.dtype, came.shape) != (x.dtype, x.shape):
            raise UserError(
                f"tensor {name!r} of {what}: expected {x.dtype}{list(x.shape)}, got {came.dtype}{list(came.shape)}"
            )
    return jax.tree.unflatten(jax.tree.structure(like), [tensors[name] for name in expected])


def finite(tree: PyTree) -> bool:
    """Whether all values in a tree are finite."""
    return all(np.isfinite(x).all() for x in jax.tree.leaves(tree))


def check_finite(tree: PyTree, what: str, advice: str = "") -> None:
    """Raise an error if a value in a tree is not finite."""
    if not finite(tree):
        raise UserError(f"{what} is not finite{advice}")


def as_outcomes(outcomes: dict[str, dict[str, Any]]) -> AgentOutcomes:
    """Convert arrays of outcomes to plain numbers."""
    return AgentOutcomes(**{when: {name: float(x) for name, x in named.items()} for when, named in outcomes.items()})


_privatize = jit(privatize)
