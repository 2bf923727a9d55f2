"""Linear state feedback with Gaussian exploration: the policies of the linear-quadratic regulator."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from perfedrl.envs import Fleet
from perfedrl.envs.inverse_transform import standard_normal
from perfedrl.errors import UserError
from perfedrl.policies.base import Policy
from perfedrl.policies.divergences import GaussianParameters, gaussian
from perfedrl.policies.mlp import observation_size, times
from perfedrl.saved_policies import descriptions
from perfedrl.types import Array, Noise, Params

GAIN = 1.62
"""K_0 = 1.62 I, the initial gain of the federated LQR literature."""


class LinearGaussian(Policy):
    """u = -K x + std z. Parameters are the gain K[m, n] and, where `learn_std`, the logarithms of the deviations.

    `gain` is the initial K. Without exploration, std = 0, there is no density to differentiate: such a policy works
    with exact and zeroth-order gradients only.
    """

    gain: Float[Array, "m n"]
    std: float = eqx.field(static=True)
    learn_std: bool = eqx.field(static=True)

    def __init__(self, gain, std: float = 0.1, learn_std: bool = False):
        self.gain, self.std, self.learn_std = np.asarray(gain, float), float(std), bool(learn_std)
        if self.gain.ndim != 2 or not np.isfinite(self.gain).all():
            raise UserError(f"gain must be a matrix of finite numbers [m, n]; it is {np.asarray(gain).tolist()}")
        if not 0 <= self.std < float("inf"):
            raise UserError(f"std must be a finite number >= 0; it is {std}")
        if self.learn_std and self.std == 0:
            raise UserError("learn_std needs a std > 0 to start from")

    @property
    def action_size(self) -> int:
        return self.gain.shape[0]

    @property
    def noise(self) -> int:
        return self.action_size if self.std else 0

    @property
    def description(self) -> descriptions.LinearGaussianDescription:
        m, n = self.gain.shape
        return descriptions.LinearGaussianDescription(shape=(m, n), std=self.std, learn_std=self.learn_std)

    def init(self, key: PRNGKeyArray) -> Params:
        gain = jnp.asarray(self.gain, float)
        if not self.learn_std:
            return {"gain": gain}
        return {"gain": gain, "log_std": jnp.full(self.action_size, np.log(self.std), float)}

    def mean(self, params: Params, obs: Float[Array, " n"]) -> Float[Array, " m"]:
        """Return the mean action -K x."""
        if np.shape(obs) != self.gain.shape[1:]:  # a product would broadcast
            raise ValueError(f"the gain takes states of length {self.gain.shape[1]}, not of shape {np.shape(obs)}")
        return -times(obs, params["gain"].T)

    def deviation(self, params: Params) -> Float[Array, " m"]:
        """Return the standard deviations of the actions."""
        return jnp.exp(params["log_std"]) if self.learn_std else jnp.full(self.action_size, self.std, float)

    def sample(self, params: Params, obs: Float[Array, " n"], u: Noise) -> Float[Array, " m"]:
        mean = self.mean(params, obs)
        return mean + (self.deviation(params) * standard_normal(u)).astype(mean.dtype) if self.std else mean

    def log_prob(self, params: Params, obs: Float[Array, " n"], action: Float[Array, " m"]) -> Float[Array, ""]:
        if not self.std:
            raise UserError("a policy with std = 0 has no score: set std > 0, or use zeroth-order gradients")
        std = self.deviation(params)
        return -jnp.sum(0.5 * ((action - self.mean(params, obs)) / std) ** 2 + jnp.log(std) + 0.5 * np.log(2 * np.pi))

    def entropy(self, params: Params, obs: Float[Array, " n"]) -> Float[Array, ""]:
        """The entropy of the Gaussian, the same at every state."""
        if not self.std:
            raise UserError("a policy with std = 0 has no entropy that could be rewarded: set entropy = 0")
        return jnp.sum(jnp.log(self.deviation(params)) + 0.5 * np.log(2 * np.pi * np.e))

    def distribution(self, params: Params, obs: Float[Array, " n"]) -> GaussianParameters:
        return self.mean(params, obs), self.deviation(params)

    divergence = staticmethod(gaussian)

    def variance(self, params: Params) -> Float[Array, ""]:
        return jnp.mean(self.deviation(params) ** 2)


def linear_gaussian(
    fleet: Fleet, gain: float | Sequence[Sequence[float]] = GAIN, std: float = 0.1, learn_std: bool = False
) -> LinearGaussian:
    """Linear feedback u = -K x with Gaussian exploration; `gain` is a number times the identity, or a matrix."""
    m = fleet.train.action_size
    if not isinstance(m, int):
        raise UserError(
            "the policy 'linear-gaussian' needs agents whose actions are vectors; for others there is 'mlp'"
        )
    n = observation_size(fleet, "linear-gaussian")
    try:
        start = np.asarray(gain, float)
    except ValueError as error:
        raise UserError(f"gain must be a number or a matrix with rows of one length; it is {gain!r}") from error
    if start.ndim and start.shape != (m, n):
        raise UserError(f"gain must be a number or have shape {(m, n)} to fit the fleet; it has shape {start.shape}")
    return LinearGaussian(start if start.ndim else start * np.eye(m, n), std, learn_std)
