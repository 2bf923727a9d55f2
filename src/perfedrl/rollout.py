"""Episodes: (policy, parameters, task, uniforms) -> Trajectory."""

from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, PRNGKeyArray

from perfedrl.envs.fleet import brings_examples, brings_sampler
from perfedrl.errors import UserError
from perfedrl.policies import Policy
from perfedrl.types import Array, Params, Trajectory


@runtime_checkable
class Sampler(Protocol):
    """All that an agent offers to an algorithm: fresh experience under given parameters."""

    @property
    def traceable(self) -> bool:
        """Whether JAX can trace through `sample`; for a plain Python sampler (a robot, say) it is False."""
        ...

    def sample(self, params: Params, key: PRNGKeyArray, m: int) -> Trajectory: ...


class RolloutSampler(eqx.Module):
    """Samples a JAX environment: everything fuses into the caller's jit."""

    task: Any
    policy: Any

    traceable = True

    def sample(self, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        """Draw m independent trajectories xi ~ q_i(.; theta), eq. (1)."""
        u = jax.random.uniform(key, (m, noise_size(self.policy, self.task)))
        return jax.vmap(lambda u: episode(self.policy, params, self.task, u))(u)


class Outline(eqx.Module):
    """Made-up episodes of an agent that is played in Python: what has their shapes can be checked, not learned from."""

    task: Any = eqx.field(static=True)

    traceable = True

    def sample(self, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        return self.task.outline(m)


def sampler(task: Any, policy: Any) -> Sampler:
    """What samples an agent: what its task brings, or JAX by the task's steps."""
    check_episodes(task)
    return task.sampler(policy) if brings_sampler(task) else RolloutSampler(task, policy)


def outline(task: Any, policy: Any) -> Sampler:
    """What JAX can trace in its place, to see shapes."""
    check_episodes(task)
    return Outline(task) if brings_sampler(task) else RolloutSampler(task, policy)


def check_episodes(task: Any) -> None:
    """Refuse an agent that has no episodes."""
    if brings_examples(task):
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
