"""What a curvature estimator is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import PRNGKeyArray

from perfedrl.estimators.returns import Credit
from perfedrl.types import Params, Scalar, Trajectory

UNBIASED = "none"


@runtime_checkable
class Curvature(Protocol):
    """Estimates grad^2 J(theta) v from m trajectories of an agent (a `PolicyObjective`).

    Hashable, since programs are compiled for it: a frozen dataclass.
    """

    @property
    def bias(self) -> str:
        """Of what order the estimate's mean is off; "none" is proven by enumeration."""
        ...

    def __call__(self, agent: Any, params: Params, v: Params, key: PRNGKeyArray, m: int) -> Params: ...


@dataclass(frozen=True)
class FromBatch:
    """A form that is a mean over the trajectories of one batch under the current policy.

    `form(policy, params, batch, credit, v)`; `settings` are further arguments by name, and where `discounted` the
    discount is one of them. `bias` is of the order that `Curvature` says.
    """

    form: Callable[..., Params]
    bias: str
    settings: tuple[tuple[str, Any], ...] = ()
    discounted: bool = False

    def __call__(self, agent: Any, params: Params, v: Params, key: PRNGKeyArray, m: int) -> Params:
        return agent.product(self, params, agent.sampler.sample(params, key, m), v)

    def product(
        self, policy: Any, params: Params, batch: Trajectory, credit: Credit, v: Params, discount: Scalar
    ) -> Params:
        """The mean over a batch, or over a slice of one whose credit is that of the whole batch."""
        settings = dict(self.settings) | ({"discount": discount} if self.discounted else {})
        return self.form(policy, params, batch, credit, v, **settings)
