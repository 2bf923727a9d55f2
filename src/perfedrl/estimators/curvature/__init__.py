"""Hessian-vector products of J from trajectories, matrix-free: one registry, and each form says how it is biased."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import PRNGKeyArray

from perfedrl.errors import UserError
from perfedrl.estimators.curvature import pairs, surrogates
from perfedrl.estimators.curvature.differences import CentralDifferences, central_common, central_fresh
from perfedrl.estimators.curvature.marginal import marginalized as marginalized_form
from perfedrl.estimators.gradient import Credit
from perfedrl.registry import registry
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


def score() -> Curvature:
    """The paper's form, eq. (3): every decision paired with all of its trajectory."""
    return FromBatch(pairs.score, UNBIASED)


def causal() -> Curvature:
    """Pairs of decisions weighted by what followed the later one: the paper's form less what only adds noise."""
    return FromBatch(pairs.causal, UNBIASED)


def lvc() -> Curvature:
    """ProMP's low-variance curvature: pairs of different decisions are dropped."""
    return FromBatch(pairs.lvc, "1: pairs of different decisions are dropped")


def dice() -> Curvature:
    """DiCE; its baseline reaches single decisions only."""
    return FromBatch(surrogates.dice, UNBIASED)


def loaded_dice() -> Curvature:
    """Loaded DiCE: DiCE for advantages."""
    return FromBatch(surrogates.loaded_dice, UNBIASED)


def taming() -> Curvature:
    """Taming MAML: DiCE with a control variate for pairs of decisions."""
    return FromBatch(surrogates.taming, UNBIASED)


def taypo(decay: float = 1.0) -> Curvature:
    """Second-order TayPO; with decay < 1 pairs of decisions count less the further they are apart."""
    if not 0 <= decay <= 1:
        raise UserError(f"taypo: decay must lie in [0, 1]; it is {decay}")
    bias = UNBIASED if decay == 1 else "1 - decay: pairs count less the further they are apart"
    return FromBatch(surrogates.taypo, bias, (("decay", float(decay)),))


def marginalized(strength: float = 1e-2) -> Curvature:
    """The causal form with a fitted action-value summed over all actions, for finitely many of them."""
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
