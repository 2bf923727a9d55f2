"""Agents and tasks that JAX cannot trace, as far as the library can tell."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from perfedrl.compilation import jit
from perfedrl.envs import PlayedTask, arc
from perfedrl.errors import EnvironmentFailureError
from perfedrl.rollout import RolloutSampler
from perfedrl.types import Trajectory

ARC = arc(3, 2)
AGENTS = [ARC.task(i) for i in range(3)], [ARC.task(i, held_out=True) for i in range(2)]
draw = jit(lambda sampler, params, key, m: sampler.sample(params, key, m), static_argnums=3)


class Untraced(eqx.Module):
    """Another agent's estimates, to be asked for in Python."""

    inner: Any

    traceable = False

    def gradient(self, params, key, m):
        return self.inner.gradient(params, key, m)

    def curvature(self, params, v, key, m):
        return self.inner.curvature(params, v, key, m)

    def value(self, params, key, m):
        return self.inner.value(params, key, m)


@dataclasses.dataclass(frozen=True)
class Played(PlayedTask):
    """A JAX task that pretends to be a robot: JAX may not look into what it plays."""

    task: Any
    broken: bool = False

    horizon, discount, actions, observation_size = 20, 0.9, 8, 2

    def sampler(self, policy):
        return Played.Sampler(self, policy)

    def outline(self, m):
        zeros = jnp.zeros((m, 21))
        return Trajectory(jnp.zeros((m, 21, 2)), zeros.astype(jnp.int32), zeros, zeros)

    def outcomes(self, episode):
        return self.task.outcomes(episode)

    @dataclasses.dataclass(frozen=True)
    class Sampler:
        """Plays, and may be broken."""

        played: Any
        policy: Any

        traceable = False

        def sample(self, params, key, m):
            if self.played.broken:
                raise EnvironmentFailureError("agent 1: a wheel came off")
            return draw(RolloutSampler(self.played.task, self.policy), params, key, m)
