"""The table [normalization] of a config: which signals are normalized, and where the moments are stored."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from perfedrl.algorithms import Algorithm, ContextAdaptation
from perfedrl.envs import Fleet
from perfedrl.errors import UserError
from perfedrl.estimators.curvature import CentralDifferences, Curvature
from perfedrl.policies.normalized import Normalized, normalized

LOCAL_STEP, ADAPTATION_STEP = 0.1, 0.5
"""The default share of the way to a batch's moments in a local step, and its maximum in an adaptation step."""

Home = Literal["none", "federated", "local"]


class Normalization(BaseModel):
    """Whether observations and rewards are normalized, and whether their moments are federated or stay local."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    observations: Home = "none"
    rewards: Home = "none"
    rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)


def normalize(table: Normalization | None, fleet: Fleet, policy: Any, algorithm: Algorithm) -> Any:
    """The policy with the normalization that a config asks for."""
    if table is None:
        return policy
    if not algorithm.federated and "federated" in (table.observations, table.rewards):
        raise UserError(f'{type(algorithm).__name__} sends nothing; its normalization must be "local" or "none"')
    check_optimizer(algorithm)
    if isinstance(algorithm, ContextAdaptation) and table.observations == "local":
        raise UserError(
            "the algorithm 'context' adapts nothing but a context, so that \"local\" moments of a new agent would stay "
            'at their start: make them "federated"'
        )
    rate = rate_for(algorithm) if table.rate is None else table.rate
    check_rate(algorithm, rate)
    return normalized(fleet, policy, table.observations != "none", table.rewards != "none", rate)


def personal_moments(table: Normalization | None) -> tuple[str, ...]:
    """Names of the moments that stay with the agents, as `Personal` takes them."""
    homes = {} if table is None else {"observations": table.observations, "rewards": table.rewards}
    return tuple(f"normalizer.{name}" for name, home in homes.items() if home == "local")


def rate_for(algorithm: Algorithm) -> float:
    """The default rate: LOCAL_STEP of the way in a local step, and at most ADAPTATION_STEP in an adaptation step."""
    sizes = [(LOCAL_STEP, "beta"), (ADAPTATION_STEP, "alpha"), (ADAPTATION_STEP, "deployment_alpha")]
    found = algorithm.step_sizes
    return min((share / size for share, name in sizes if (size := found.get(name))), default=1.0)


def check_optimizer(algorithm: Algorithm) -> None:
    """Reject optimizers that scale coordinates: moments must move a share of the way to those of a batch."""
    if algorithm.scales_coordinates:
        raise UserError(
            f"[normalization] moves its moments along gradients, which the optimizer of {type(algorithm).__name__} "
            'does not follow: set optimizer = "sgd", or leave out [normalization]'
        )


def check_rate(algorithm: Algorithm, rate: float) -> None:
    """Reject steps beyond a batch's moments, and adaptation steps that reach them: those would replace the moments."""
    for name in ("alpha", "beta", "deployment_alpha"):
        share = algorithm.step_sizes.get(name, 0.0) * rate
        if share > 1 or (share == 1 and name != "beta"):
            most = "at most 1" if name == "beta" else "less than 1"
            raise UserError(
                f"{name} times the normalization's rate must be {most}, as a share of the way to a batch's moments, "
                f"got {share:g}; lower the rate, or leave it out"
            )


def check_curvature(policy: Any, curvature: Curvature) -> None:
    """Reject central differences for normalized policies, since they would also vary the moments."""
    if isinstance(policy, Normalized) and isinstance(curvature, CentralDifferences):
        raise UserError(
            "central differences would also differentiate by the normalization's moments; choose another form of "
            "curvature, or leave out [normalization]"
        )
