"""Episodes: (policy, parameters, task, uniforms) -> Trajectory."""

from abc import ABC, abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, PRNGKeyArray

from perfedrl.contracts import default_property, undefined
from perfedrl.envs.base import DataTask, PlayedTask
from perfedrl.errors import UserError
from perfedrl.policies import Policy
from perfedrl.types import Array, Params, Sampler, Trajectory


class RolloutSampler(eqx.Module):
    """The sampler of a JAX environment, which is compiled together with its caller."""

    task: Any
    policy: Any

    traceable = True

    def sample(self, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        """Draw m independent trajectories xi ~ q_i(.; theta), eq. (1)."""
        u = jax.random.uniform(key, (m, noise_size(self.policy, self.task)))
        return jax.vmap(lambda u: episode(self.policy, params, self.task, u))(u)


class PythonSampler(ABC):
    """The base of an agent's own sampler, around a robot, say; required are `discount` and `sample`.

    A networked agent makes one where its environment is a function that takes the policy.
    """

    traceable = False

    @default_property
    def discount(self) -> float:
        """The discount factor gamma. Required."""
        raise undefined(self, "discount", "perfedrl.rollout.PythonSampler")

    @abstractmethod
    def sample(self, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        """Play m independent episodes under the policy with these parameters."""

    def outcomes(self, episode: Trajectory) -> dict[str, Any]:
        """Measurements of one episode beside its return, such as {"success": ...}."""
        return {}


class OutlineSampler(eqx.Module):
    """Made-up episodes of a played task, with the right shapes: for checks before anything is played."""

    task: Any = eqx.field(static=True)

    traceable = True

    def sample(self, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        return self.task.outline(m)


def sampler(task: Any, policy: Any) -> Sampler:
    """Return the sampler of an agent: its own where it is played in Python, rollouts in JAX otherwise."""
    check_episodes(task)
    return task.sampler(policy) if isinstance(task, PlayedTask) else RolloutSampler(task, policy)


def outline(task: Any, policy: Any) -> Sampler:
    """Return a sampler that JAX can trace, for the shapes of an agent's episodes."""
    check_episodes(task)
    return OutlineSampler(task) if isinstance(task, PlayedTask) else RolloutSampler(task, policy)


def check_episodes(task: Any) -> None:
    """Reject an agent that has examples instead of episodes."""
    if isinstance(task, DataTask):
        raise UserError("these agents have examples to learn from and no episodes, which this needs")


def noise_size(policy: Policy, task: Any) -> int:
    """The number of uniforms that one episode consumes."""
    return task.reset_noise + (task.horizon + 1) * (policy.noise + task.step_noise)


def episode(policy: Policy, params: Params, task: Any, u: Float[Array, " noise"]) -> Trajectory:
    """Play one episode of H + 1 decisions as a deterministic function of its uniforms."""
    reset, steps = u[: task.reset_noise], u[task.reset_noise :].reshape(task.horizon + 1, -1)

    def decide(carry: Any, u: Any) -> tuple[Any, Trajectory]:
        state, alive = carry
        obs = task.observe(state)
        action = policy.sample(params, obs, u[: policy.noise])
        state, reward, done = task.step(state, action, u[policy.noise :])
        return (state, alive * (1 - jnp.asarray(done, alive.dtype))), Trajectory(obs, action, reward * alive, alive)

    return jax.lax.scan(decide, (task.reset(reset), jnp.ones((), u.dtype)), steps)[1]
