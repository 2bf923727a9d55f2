"""Estimators of Hessian-vector products of J from trajectories, without forming a matrix.

The registry `CURVATURES` holds all forms; each states the order of its bias.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import PRNGKeyArray

from perfedrl.errors import UserError
from perfedrl.estimators.curvature import pairs, surrogates
from perfedrl.estimators.curvature.differences import CentralDifferences, central_common, central_fresh
from perfedrl.estimators.curvature.marginal import marginalized as marginalized_form
from perfedrl.estimators.gradient import UNBIASED, Credit
from perfedrl.registry import registry
from perfedrl.types import Params, Scalar, Trajectory


@runtime_checkable
class Curvature(Protocol):
    """An estimator of grad^2 J(theta) v from m trajectories of an agent (a `PolicyObjective`).

    Must be hashable, such as a frozen dataclass, because compiled programs depend on it.
    """

    @property
    def bias(self) -> str:
        """Order of the bias; "none" for forms that enumeration proves unbiased."""
        ...

    def __call__(self, agent: Any, params: Params, v: Params, key: PRNGKeyArray, m: int) -> Params: ...


@dataclass(frozen=True)
class FromBatch:
    """A form that is a mean over the trajectories of one batch sampled with the current policy.

    It calls `form(policy, params, batch, credit, v, **settings)`, with the discount as a further keyword argument if
    `discounted`. `bias` is as in `Curvature`.
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
        """Compute the mean over a batch, or over a slice whose credit was computed from the whole batch."""
        settings = dict(self.settings) | ({"discount": discount} if self.discounted else {})
        return self.form(policy, params, batch, credit, v, **settings)


def score() -> Curvature:
    """The paper's form, eq. (3): every decision is paired with all decisions of its trajectory."""
    return FromBatch(pairs.score, UNBIASED)


def causal() -> Curvature:
    """Pairs of decisions weighted by the advantage of the later one: eq. (3) without its zero-mean terms."""
    return FromBatch(pairs.causal, UNBIASED)


def lvc() -> Curvature:
    """ProMP's low-variance curvature: pairs of different decisions are dropped."""
    return FromBatch(pairs.lvc, "1: pairs of different decisions are dropped")


def dice() -> Curvature:
    """DiCE; its baseline applies to single decisions, not to pairs."""
    return FromBatch(surrogates.dice, UNBIASED)


def loaded_dice() -> Curvature:
    """Loaded DiCE: DiCE for advantages."""
    return FromBatch(surrogates.loaded_dice, UNBIASED)


def taming() -> Curvature:
    """Taming MAML: DiCE with a control variate for pairs of decisions."""
    return FromBatch(surrogates.taming, UNBIASED)


def taypo(decay: float = 1.0) -> Curvature:
    """Second-order TayPO; with decay < 1, pairs of decisions count less the further they are apart."""
    if not 0 <= decay <= 1:
        raise UserError(f"taypo: decay must lie in [0, 1]; it is {decay}")
    bias = UNBIASED if decay == 1 else "1 - decay: pairs count less the further they are apart"
    return FromBatch(surrogates.taypo, bias, (("decay", float(decay)),))


def marginalized(strength: float = 1e-2) -> Curvature:
    """The causal form with a fitted action value summed over all actions, for finite action sets."""
    if not 0 < strength < float("inf"):
        raise UserError(f"marginalized: strength must be a finite number > 0; it is {strength}")
    return FromBatch(marginalized_form, UNBIASED, (("strength", float(strength)),), discounted=True)


CURVATURES = registry(
    "curvature estimator",
    score=score,
    causal=causal,
    lvc=lvc,
    dice=dice,
    loaded_dice=loaded_dice,
    taming=taming,
    taypo=taypo,
    central_fresh=central_fresh,
    central_common=central_common,
    marginalized=marginalized,
)

__all__ = ["CURVATURES", "UNBIASED", "CentralDifferences", "Curvature", "FromBatch", "causal", "score"]
