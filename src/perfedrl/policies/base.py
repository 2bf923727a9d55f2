"""What a policy is."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.types import Array, Noise, Params


@runtime_checkable
class Policy(Protocol):
    """pi(a | s; theta). Written for one decision; callers `vmap`.

    A pytree of arrays, as everything that enters a compiled program; what is not an array is a static field.
    """

    @property
    def noise(self) -> int:
        """Uniforms that one decision needs."""
        ...

    def init(self, key: PRNGKeyArray) -> Params: ...

    def sample(self, params: Params, obs: PyTree[Array], u: Noise) -> PyTree[Array]: ...

    def log_prob(self, params: Params, obs: PyTree[Array], action: PyTree[Array]) -> Float[Array, ""]: ...


@runtime_checkable
class TablePolicy(Protocol):
    """A policy over finitely many states and actions, which exact evaluation can tabulate."""

    def probabilities(self, params: Params) -> Float[Array, "S A"]: ...
