"""Softmax policies over finitely many states and actions: a table, and linear features (Example 1)."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from perfedrl.envs import Fleet, TabularMDP
from perfedrl.envs.inverse_transform import inverse_cdf
from perfedrl.errors import UserError
from perfedrl.policies.base import TablePolicy
from perfedrl.policies.divergences import categorical
from perfedrl.saved_policies import descriptions
from perfedrl.types import Array, Noise


class TableSoftmax(TablePolicy):
    """pi(a|s) proportional to exp theta[s, a]: the one-hot case of Example 1, the paper's tabular policy."""

    states: int = eqx.field(static=True)
    actions: int = eqx.field(static=True)

    noise = 1
    G, M, Lambda = 2.0, 4.0, 8.0
    """The constants of Assumption 2, from Example 1 with B = 1."""

    def init(self, key: PRNGKeyArray | None = None) -> Float[Array, "S A"]:
        """Return the parameters of the uniform policy, for any key."""
        return jnp.zeros((self.states, self.actions))

    # `sample` and `log_prob` compute the whole table and pick one entry: under vmap over decisions the table is
    # computed once, and a decision costs one look-up.
    def sample(self, params: Float[Array, "S A"], obs: Int[Array, ""], u: Noise) -> Int[Array, ""]:
        return inverse_cdf(self.probabilities(params)[obs], u[0])

    def log_prob(self, params: Float[Array, "S A"], obs: Int[Array, ""], action: Int[Array, ""]) -> Float[Array, ""]:
        return jax.nn.log_softmax(params)[obs, action]

    @property
    def description(self) -> descriptions.TableSoftmaxDescription:
        return descriptions.TableSoftmaxDescription(states=self.states, actions=self.actions)

    def entropy(self, params: Float[Array, "S A"], obs: Int[Array, ""]) -> Float[Array, ""]:
        """The entropy of the action distribution in a state."""
        return entropies(jax.nn.log_softmax(params))[obs]

    def distribution(self, params: Float[Array, "S A"], obs: Int[Array, ""]) -> Float[Array, " A"]:
        return jax.nn.log_softmax(params)[obs]

    divergence = staticmethod(categorical)

    def probabilities(self, params: Float[Array, "S A"]) -> Float[Array, "S A"]:
        return jax.nn.softmax(params)


def entropies(logp: Float[Array, "S A"]) -> Float[Array, " S"]:
    """Return the entropy of each row of a table of log-probabilities."""
    return -jnp.sum(jnp.exp(logp) * logp, axis=-1)


class LogLinearSoftmax(TablePolicy):
    """pi(a|s) proportional to exp theta . phi(s, a), Example 1, with features phi[S, A, d]."""

    features: Float[Array, "S A d"]

    noise = 1

    @property
    def states(self) -> int:
        return self.features.shape[0]

    @property
    def actions(self) -> int:
        return self.features.shape[1]

    @property
    def B(self) -> float:  # noqa: N802
        """The largest norm of a feature vector."""
        return float(np.linalg.norm(self.features, axis=-1).max())

    @property
    def G(self) -> float:  # noqa: N802
        """Assumption 2(a): a bound on the score's norm."""
        return 2 * self.B

    @property
    def M(self) -> float:  # noqa: N802
        """Assumption 2(b): a bound on the norm of the Hessian of log pi."""
        return 4 * self.B**2

    @property
    def Lambda(self) -> float:  # noqa: N802
        """Assumption 2(c): a Lipschitz constant of the Hessian of log pi."""
        return 8 * self.B**3

    def init(self, key: PRNGKeyArray | None = None) -> Float[Array, " d"]:
        """Return the parameters of the uniform policy, for any key."""
        return jnp.zeros(self.features.shape[-1])

    def sample(self, params: Float[Array, " d"], obs: Int[Array, ""], u: Noise) -> Int[Array, ""]:
        return inverse_cdf(self.probabilities(params)[obs], u[0])

    def log_prob(self, params: Float[Array, " d"], obs: Int[Array, ""], action: Int[Array, ""]) -> Float[Array, ""]:
        return jax.nn.log_softmax(self._logits(params))[obs, action]

    @property
    def description(self) -> descriptions.LogLinearSoftmaxDescription:
        phi = tuple(tuple(tuple(row) for row in rows) for rows in np.asarray(self.features, float).tolist())
        return descriptions.LogLinearSoftmaxDescription(states=self.states, actions=self.actions, features=phi)

    def entropy(self, params: Float[Array, " d"], obs: Int[Array, ""]) -> Float[Array, ""]:
        """The entropy of the action distribution in a state."""
        return entropies(jax.nn.log_softmax(self._logits(params)))[obs]

    def distribution(self, params: Float[Array, " d"], obs: Int[Array, ""]) -> Float[Array, " A"]:
        return jax.nn.log_softmax(self._logits(params))[obs]

    divergence = staticmethod(categorical)

    def probabilities(self, params: Float[Array, " d"]) -> Float[Array, "S A"]:
        return jax.nn.softmax(self._logits(params))

    def _logits(self, params: Float[Array, " d"]) -> Float[Array, "S A"]:
        # A product and a sum instead of a dot product: the bits do not depend on the number of agents and seeds.
        return jnp.sum(jnp.asarray(self.features, params.dtype) * params, axis=-1)


def table(fleet: Fleet) -> TableSoftmax:
    """A softmax with one parameter per state and action."""
    mdps = _tabular(fleet, "table")
    return TableSoftmax(mdps.states, mdps.actions)


def log_linear(fleet: Fleet, features: Sequence[Sequence[Sequence[float]]] | None = None) -> LogLinearSoftmax:
    """A softmax over theta . phi(s, a); `features` is phi[S][A][d], one-hot when left out."""
    mdps = _tabular(fleet, "log-linear")
    S, A = mdps.states, mdps.actions
    try:
        phi = np.eye(S * A).reshape(S, A, S * A) if features is None else np.asarray(features, dtype=np.float64)
    except ValueError as error:
        raise UserError("features must be a full array phi[S][A][d]; got a ragged one") from error
    if not np.isfinite(phi).all():
        raise UserError("features must be finite")
    if phi.ndim != 3 or phi.shape[:2] != (S, A):
        raise UserError(f"features must have shape [{S}, {A}, d] to fit the fleet; they have shape {list(phi.shape)}")
    return LogLinearSoftmax(phi)


def _tabular(fleet: Fleet, name: str) -> TabularMDP:
    if not isinstance(fleet.train, TabularMDP):
        raise UserError(f"the policy {name!r} needs agents with finitely many states (a fleet of TabularMDP)")
    return fleet.train
