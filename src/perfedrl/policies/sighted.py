"""Agents that see numbers of their own task: every observation ends with them.

A policy that sees its task need not find out what the task is. `sighted` makes such a fleet of any fleet whose
observations are vectors; `SightedPolicy` is a policy as the environment of one agent meets it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.contracts import delegated
from perfedrl.envs.base import BaseTask, PlayedTask, Polyline, State, Task, environment_part
from perfedrl.envs.fleet import Fleet, Roster
from perfedrl.envs.new_agents import NewAgents, Settings
from perfedrl.envs.sight import Sight, settings_of, sight_of
from perfedrl.errors import UserError
from perfedrl.policies.base import Decide, Policy
from perfedrl.policies.mlp import observation_size
from perfedrl.saved_policies.decisions import appended, decide_appended
from perfedrl.saved_policies.descriptions import SightedDescription
from perfedrl.types import Array, Noise, Params, Sampler, Trajectory


class SightedPolicy(Policy):
    """A policy for one agent's environment, after whose observations the policy sees the agent's own numbers.

    Parameters are those of the policy. Methods take observations of the environment.
    """

    policy: Any
    numbers: Float[Array, " k"]

    noise = delegated("policy")
    init = delegated("policy")
    actions = delegated("policy")
    action_size = delegated("policy")
    divergence = delegated("policy")
    variance = delegated("policy")
    scaled = delegated("policy")
    is_context = delegated("policy")

    # Members of policies over numbered states, of feedback on the state alone, and constants of the theory.
    states = probabilities = gain = None
    G = M = Lambda = regularity_within = None

    def whole(self, obs: Float[Array, "*m d"]) -> Float[Array, "*m e"]:
        """Return observations as the policy sees them."""
        obs = jnp.asarray(obs)
        more = jnp.broadcast_to(jnp.asarray(self.numbers, obs.dtype), (*obs.shape[:-1], len(self.numbers)))
        return jnp.concatenate([obs, more], axis=-1)

    def _batch(self, batch: Trajectory) -> Trajectory:
        return batch._replace(obs=self.whole(batch.obs))

    def sample(self, params: Params, obs: Float[Array, " d"], u: Noise) -> PyTree[Array]:
        return self.policy.sample(params, self.whole(obs), u)

    def log_prob(self, params: Params, obs: Float[Array, " d"], action: PyTree[Array]) -> Float[Array, ""]:
        return self.policy.log_prob(params, self.whole(obs), action)

    @property
    def entropy(self) -> Callable[[Params, PyTree[Array]], Float[Array, ""]] | None:
        entropy = self.policy.entropy
        return None if entropy is None else lambda params, obs: entropy(params, self.whole(obs))

    @property
    def distribution(self) -> Callable[[Params, PyTree[Array]], PyTree[Array]] | None:
        distribution = self.policy.distribution
        return None if distribution is None else lambda params, obs: distribution(params, self.whole(obs))

    @property
    def values(self) -> Callable[[Params, Trajectory], Float[Array, "m T"]] | None:
        values = self.policy.values
        return None if values is None else lambda params, batch: values(params, self._batch(batch))

    @property
    def value_fit(self) -> Callable[[Params, Trajectory, Float[Array, "m T"]], Float[Array, ""]] | None:
        fit = self.policy.value_fit
        return None if fit is None else lambda params, batch, target: fit(params, self._batch(batch), target)

    @property
    def moment_fit(self) -> Callable[[Params, Trajectory, Float[Array, "m T"]], Float[Array, ""]] | None:
        fit = self.policy.moment_fit
        return None if fit is None else lambda params, batch, returns: fit(params, self._batch(batch), returns)

    @property
    def model_fit(self) -> Callable[[Params, Trajectory, str], Float[Array, ""]] | None:
        fit = self.policy.model_fit
        return None if fit is None else lambda params, batch, target: fit(params, self._batch(batch), target)

    @property
    def in_numpy(self) -> Callable[[Params], Decide] | None:
        inner = self.policy.in_numpy
        return None if inner is None else lambda params: self._in_numpy(inner(params))

    def _in_numpy(self, decide: Decide) -> Decide:
        return partial(decide_appended, decide, np.asarray(self.numbers))

    @property
    def description(self) -> SightedDescription | None:
        inner, numbers = self.policy.description, tuple(np.asarray(self.numbers, float).tolist())
        return None if inner is None else SightedDescription(numbers=numbers, policy=inner)


class SightedMembers(BaseTask):
    """The members that sighted tasks of both kinds share, which follow from those of the inner task."""

    task: Any
    seen: Any

    horizon = delegated("task")
    discount = delegated("task")
    actions = delegated("task")
    action_size = delegated("task")
    environment_spaces = delegated("task")
    goal = delegated("task")
    radius = delegated("task")
    box = delegated("task")
    reward_bound = delegated("task")

    @property
    def observation_size(self) -> int | None:
        """The length of an observation with the numbers that the agent sees."""
        inner = self.task.observation_size
        return None if inner is None else inner + np.shape(self.seen)[-1]

    @property
    def observation_bound(self) -> float | None:
        """The largest norm of an observation with the numbers that the agent sees."""
        inner = self.task.observation_bound
        return None if inner is None else float(np.hypot(inner, np.linalg.norm(self.seen, axis=-1).max()))

    @property
    def measured_on(self) -> Any:
        """The task on which the agent is measured, where that is another one, with the numbers that it sees."""
        inner = self.task.measured_on
        return None if inner is None else type(self)(inner, self.seen)  # type: ignore[call-arg]

    def outcomes(self, episode: Trajectory) -> dict[str, Any]:
        """The outcomes of the inner task."""
        return self.task.outcomes(episode._replace(obs=environment_part(self, episode.obs)))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the inner task, and the numbers that the policy sees."""
        return {**self.task.settings, "seen": np.asarray(self.seen)}

    @property
    def sketch(self) -> Callable[[Any], list[Polyline]] | None:
        inner = self.task.sketch
        return None if inner is None else lambda obs: inner(environment_part(self, obs))

    @property
    def frames(self) -> Callable[[Any, Params], list[np.ndarray]] | None:
        inner = self.task.frames
        return None if inner is None else lambda policy, params: inner(self.policy_in_task(policy), params)

    def policy_in_task(self, policy: Any) -> SightedPolicy:
        """Return a policy as the inner task meets it, which gives it no numbers."""
        return SightedPolicy(policy, np.asarray(self.seen))


class SightedTask(SightedMembers, Task):
    """A task in JAX whose observations end with `seen`, numbers of the task."""

    task: Any
    seen: Float[Array, "*n k"]

    reset_noise = delegated("task")
    step_noise = delegated("task")
    reset = delegated("task")
    step = delegated("task")

    def observe(self, state: State) -> Float[Array, " d"]:
        obs = self.task.observe(state)
        return jnp.concatenate([obs, jnp.asarray(self.seen, obs.dtype)])


@dataclass(frozen=True)
class SightedPlayedTask(SightedMembers, PlayedTask):
    """A task that is played in Python, whose episodes' observations end with `seen`, numbers of the task."""

    task: PlayedTask
    seen: tuple[float, ...]

    failures = delegated("task")
    check = delegated("task")
    close = delegated("task")

    def sampler(self, policy: Any) -> "SightedSampler":
        """Return the sampler of the inner task under a policy that sees the numbers."""
        return SightedSampler(self.task.sampler(self.policy_in_task(policy)), self.seen)

    def outline(self, m: int) -> Trajectory:
        """Return m made-up episodes of the right shapes and types."""
        inner = self.task.outline(m)
        more = jnp.zeros((*inner.obs.shape[:-1], len(self.seen)), inner.obs.dtype)
        return inner._replace(obs=jnp.concatenate([inner.obs, more], axis=-1))


@dataclass(frozen=True)
class SightedSampler:
    """The sampler of a played task, whose episodes are given the numbers that the policy saw."""

    sampler: Sampler
    seen: tuple[float, ...]

    traceable = False

    def sample(self, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        """Play m independent episodes."""
        batch = self.sampler.sample(params, key, m)
        return batch._replace(obs=appended(np.asarray(batch.obs), np.asarray(self.seen)))


def sighted(fleet: Fleet, names: Sequence[str]) -> Fleet:
    """Return a fleet whose agents see the named numbers of their own tasks, standardized over the training agents."""
    sight = sight_of(fleet, names)
    try:
        observation_size(fleet, "sighted")
    except UserError as error:
        raise UserError(
            "sees needs observations that are vectors of numbers, and those of this fleet are not"
        ) from error
    numbers = [sight.numbers(settings) for settings in settings_of(fleet)]
    train, held_out = numbers[: fleet.agents], numbers[fleet.agents :]
    return Fleet(
        with_numbers(fleet.train, train),
        None if fleet.held_out is None else with_numbers(fleet.held_out, held_out),
        None if (family := fleet.new_agents) is None else sighted_family(family, sight),
        sight,
    )


def with_numbers(part: Any, numbers: Sequence[np.ndarray]) -> Any:
    """Give every agent of a part of a fleet the numbers that it sees."""
    if isinstance(part, Roster):
        return Roster([SightedPlayedTask(task, tuple(x.tolist())) for task, x in zip(part, numbers, strict=True)])
    return SightedTask(part, np.stack(numbers))


def sighted_family(family: NewAgents, sight: Sight) -> NewAgents:
    """Say how new agents are made that see numbers of their own tasks."""

    def make(task: Any, settings: Settings) -> Any:
        made = family.make(task.task, settings)
        return sighted_task(made, sight, {**settings, **made.settings})

    return replace(family, make=make)


def sighted_task(task: BaseTask, sight: Sight, settings: Settings | None = None) -> Any:
    """Return a task whose agent sees numbers of it, which are among the given settings or the task's own."""
    if task.seen is not None:
        return task
    numbers = sight.numbers(task.settings if settings is None else settings)
    if isinstance(task, PlayedTask):
        return SightedPlayedTask(task, tuple(numbers.tolist()))
    return SightedTask(task, numbers)
