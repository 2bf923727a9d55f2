"""The contract of a policy: everything that the library asks of pi(a | s; theta)."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.contracts import default_property, undefined
from perfedrl.errors import UserError
from perfedrl.saved_policies.descriptions import Description
from perfedrl.types import Array, Noise, Params, Trajectory

Decide = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Observations [n, d] and uniforms [n, k] -> actions [n, ...], in NumPy."""


class Policy(eqx.Module):
    """A stochastic policy pi(a | s; theta): required are `noise`, `init`, `sample` and `log_prob`.

    A policy is a pytree of settings; those that are not arrays are static fields. Its parameters are another pytree,
    which the methods take. Methods are written for one decision; callers `vmap`.

    A policy need not have the other members. One that it lacks is None, methods included, and so callers test
    `policy.entropy is None`. A subclass overrides a member with a field, a class attribute, a property or a method;
    a policy around another one (`ActorCritic`, `Normalized`) does so for every member. Nothing else is looked up.
    """

    @default_property
    def noise(self) -> int:
        """Number of uniforms on [0, 1) that one decision takes. Required."""
        raise undefined(self, "noise", "perfedrl.policies.Policy")

    @abstractmethod
    def init(self, key: PRNGKeyArray) -> Params:
        """Draw the parameters that training starts from."""

    @abstractmethod
    def sample(self, params: Params, obs: PyTree[Array], u: Noise) -> PyTree[Array]:
        """Draw an action, as a deterministic function of `noise` uniforms."""

    @abstractmethod
    def log_prob(self, params: Params, obs: PyTree[Array], action: PyTree[Array]) -> Float[Array, ""]:
        """Return log pi(action | obs; params), differentiable in the parameters."""

    # Spaces.

    @default_property
    def actions(self) -> int | tuple[int, ...] | None:
        """Number of discrete actions, or of choices of each component of an action."""

    @default_property
    def action_size(self) -> int | None:
        """Length of an action that is a vector."""

    @default_property
    def states(self) -> int | None:
        """Number of states, where observations are their numbers."""

    @default_property
    def probabilities(self) -> Callable[[Params], Float[Array, "S A"]] | None:
        """The policy as a table: `probabilities(params)` is pi[S, A]. Exact evaluation needs it."""

    # Training.

    @default_property
    def entropy(self) -> Callable[[Params, PyTree[Array]], Float[Array, ""]] | None:
        """Entropy of the action distribution: `entropy(params, obs)`. A bonus for it is `entropy > 0` in a config."""

    @default_property
    def distribution(self) -> Callable[[Params, PyTree[Array]], PyTree[Array]] | None:
        """Arrays that determine the action distribution at an observation: `distribution(params, obs)`."""

    @default_property
    def divergence(self) -> Callable[[PyTree[Array], PyTree[Array]], Float[Array, ""]] | None:
        """Kullback-Leibler divergence KL(one || other) of two results of `distribution`: `divergence(one, other)`."""

    @default_property
    def variance(self) -> Callable[[Params], Float[Array, ""]] | None:
        """Mean variance of the components of an action, where it is the same at every observation."""

    @default_property
    def values(self) -> Callable[[Params, Trajectory], Float[Array, "m T"]] | None:
        """Values of all visited states: `values(params, batch)`, as shares of the largest reward-to-go."""

    @default_property
    def value_fit(self) -> Callable[[Params, Trajectory, Float[Array, "m T"]], Float[Array, ""]] | None:
        """Objective of the values: `value_fit(params, batch, target)`, maximized along with the return."""

    @default_property
    def scaled(self) -> Callable[[Params, Float[Array, "..."]], Float[Array, "..."]] | None:
        """Normalized returns: `scaled(params, returns)`."""

    @default_property
    def moment_fit(self) -> Callable[[Params, Trajectory, Float[Array, "m T"]], Float[Array, ""]] | None:
        """Objective of the moments: `moment_fit(params, batch, returns)`, maximized along with the return."""

    @default_property
    def is_context(self) -> Callable[[Params], PyTree[bool]] | None:
        """Which parameters are a context, the only ones that the algorithm 'context' adapts: `is_context(params)`."""

    @default_property
    def model_fit(self) -> Callable[[Params, Trajectory, str], Float[Array, ""]] | None:
        """Minus the error of the model with which a context is adapted: `model_fit(params, batch, target)`.

        `target` says what is predicted, "reward" or "dynamics".
        """

    # Decisions outside of JAX.

    @default_property
    def in_numpy(self) -> Callable[[Params], Decide] | None:
        """Decisions for environments that are stepped in Python: `in_numpy(params)` decides for a whole batch.

        There a decision takes ten microseconds, and a compiled call several times that. Where it is None, `sample` is
        compiled. Both decide alike, up to rounding.
        """

    @default_property
    def description(self) -> Description | None:
        """The policy as a plain table, with which a file of its parameters can be opened and acted with without JAX.

        The classes of such tables are in `perfedrl.saved_policies.descriptions`.
        """

    # Exact quantities and the theory's constants.

    @default_property
    def gain(self) -> Float[Array, "m n"] | None:
        """The initial K of linear state feedback u = -K x, whose parameters have an entry "gain"."""

    @default_property
    def G(self) -> float | None:  # noqa: N802
        """Assumption 2(a): a bound on the norm of the score. Where it is given, so are M and Lambda."""

    @default_property
    def M(self) -> float | None:  # noqa: N802
        """Assumption 2(b): a bound on the norm of the Hessian of log pi."""

    @default_property
    def Lambda(self) -> float | None:  # noqa: N802
        """Assumption 2(c): a Lipschitz constant of the Hessian of log pi."""

    @default_property
    def regularity_within(self) -> Callable[[float, float], tuple[float, float, float]] | None:
        """G, M and Lambda on a ball: `regularity_within(radius, observation)`, for |theta| <= radius.

        `observation` bounds the norm of observations.
        """

    def __check_init__(self) -> None:
        _ = self.noise


class TablePolicy(Policy):
    """A policy over finitely many states and actions, which has `probabilities`, `states` and `actions`."""

    @abstractmethod
    def probabilities(self, params: Params) -> Float[Array, "S A"]:
        """Return pi[S, A]."""


def check_policy(policy: Any) -> None:
    """Reject an object that does not subclass `Policy`."""
    if not isinstance(policy, Policy):
        raise UserError(f"a {type(policy).__name__} is not a policy: subclass perfedrl.policies.Policy")
