"""Compare estimators: repeat each estimate many times, compare it with the truth, and time it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from perfedrl.algorithms.checks import check_counts
from perfedrl.compilation import jit
from perfedrl.errors import UserError, nearest
from perfedrl.estimators import Baseline, Curvature, Sampled
from perfedrl.experiments.config import Config, whole
from perfedrl.rollout import check_episodes
from perfedrl.studies.estimators.candidates import CURVATURE, Estimator, candidates
from perfedrl.studies.estimators.moments import ErrorMoments, EstimateError, ValueWithError, error, moments, ratio
from perfedrl.studies.estimators.points import CHUNK, REFERENCE, STAGES, EstimateInputs, Point, flat, visit
from perfedrl.theory.fleet_problem import is_tabular
from perfedrl.types import Array, Params, Progress, Trajectory, Whole

REPLICATES, AGENTS, TRAJECTORIES = 300, 2, 10
MOST_REPLICATES, LEAST_REFERENCE, MOST_REFERENCE = 100_000, 10 * CHUNK, 1_000_000_000
CALLS = 4
"""The smallest number of timed calls, of which the first does not count."""

SAME = 1e-4
"""Relative difference below which variances from the same draws belong to equal estimates, up to rounding."""


class EstimatorRow(NamedTuple):
    """The measurements of an estimator at one stage of training, means over agents."""

    stage: str
    round: int
    estimator: Estimator
    error: EstimateError
    ratio: ValueWithError
    """The variance divided by that of the paper's estimator of the same quantity from as many trajectories."""
    microseconds: float
    """Time per estimate in a compiled loop on this machine, including the sampling of trajectories."""

    def same(self, other: "EstimatorRow") -> bool:
        """Whether two forms with the same baseline are equal estimates, as several published ones are."""
        alike = self.estimator.baseline == other.estimator.baseline
        return alike and bool(np.isclose(self.error.variance.value, other.error.variance.value, rtol=SAME, atol=0))


class Recommendation(NamedTuple):
    """Curvature forms to choose at one stage.

    `best` has the least variance among unbiased forms, `equal` are the same estimate by other names, `paper` is the
    paper's form, and `closest` has the least mean squared error among all forms.
    """

    best: EstimatorRow
    equal: tuple[EstimatorRow, ...]
    paper: EstimatorRow
    closest: EstimatorRow


@dataclass(frozen=True)
class EstimatorComparison:
    """All rows, with the config and the sizes that they were measured with."""

    config: Config
    seed: int
    m: int
    replicates: int
    agents: int
    reference: int | None
    """Trajectories per agent and stage from which the truth is estimated; None where it is exact."""
    rows: tuple[EstimatorRow, ...]

    @property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(row.stage for row in self.rows))

    def at(self, stage: str, quantity: str) -> list[EstimatorRow]:
        """The estimators of a quantity at a stage, in the order of measurement."""
        return [row for row in self.rows if (row.stage, row.estimator.quantity) == (stage, quantity)]

    def recommendation(self, stage: str) -> Recommendation:
        """The curvature forms to choose at a stage."""
        rows = self.at(stage, CURVATURE)
        unbiased = [row for row in rows if row.estimator.unbiased]
        least = min(unbiased, key=lambda row: row.error.variance.value)
        best, *equal = (row for row in unbiased if row.same(least))
        (paper,) = (row for row in rows if row.estimator.is_paper)
        return Recommendation(best, tuple(equal), paper, min(rows, key=lambda row: row.error.square))


def compare_estimators(
    config: Config,
    stages: Sequence[str] = STAGES,
    *,
    m: int | None = None,
    replicates: int = REPLICATES,
    agents: int | None = None,
    seed: int | None = None,
    forms: Sequence[str] = (),
    baselines: Sequence[str] = (),
    reference: int = REFERENCE,
    progress: Progress = lambda _: None,
) -> EstimatorComparison:
    """Compare estimators of grad^2 J_i(theta) v and of grad J_i(theta) from m trajectories, `replicates` times each.

    Theta is the shared initialization of one seed (by default the config's first) at some stages of its training, v the
    unit direction of the outer gradient there, and agents are the first `agents` of the fleet. By default all forms and
    baselines that work with the policy are compared; the paper's estimator is always included. The truth is exact for
    tabular fleets; otherwise it is an unbiased estimate from `reference` trajectories, whose noise is accounted for.
    """
    parts = config.experiment
    m = (parts.algorithm.curvature_trajectories or TRAJECTORIES) if m is None else m
    agents = min(AGENTS, parts.fleet.agents) if agents is None else agents
    seed = config.seeds[0] if seed is None else seed
    check(config, stages, m, replicates, agents, seed, reference)
    estimators = candidates(config, m, forms, baselines)
    points = list(visit(config, stages, replicates, agents, seed, reference, progress))
    baselines_used = tuple(dict.fromkeys(estimator.subtracted for estimator in estimators))
    found = []
    for i, estimator in enumerate(estimators, start=1):
        progress(f"{estimator.name} ({i} of {len(estimators)})")
        found.append((estimator, *replicate(estimator, baselines_used, parts.policy, points, m)))
    exact = is_tabular(parts.fleet, parts.policy)
    reference_used = None if exact else reference // CHUNK * CHUNK
    return EstimatorComparison(config, seed, m, replicates, agents, reference_used, rows(points, found))


def check(
    config: Config, stages: Sequence[str], m: int, replicates: int, agents: int, seed: int, reference: int
) -> None:
    """Check the arguments of `compare_estimators` before anything compiles."""
    if not config.experiment.algorithm.federated:
        raise UserError(f"{config.algorithm['name']} trains every agent alone: there is no shared initialization")
    check_episodes(config.experiment.fleet.train)
    if not config.experiment.fleet.traceable:
        raise UserError(
            "estimators are compared on fleets in JAX, since this takes many thousand trajectories; the environment "
            f"{config.fleet['env']!r} is played in Python"
        )
    for stage in stages:
        if stage not in STAGES:
            raise UserError(f"unknown stage {stage!r}{nearest(stage, STAGES)}")
    if not stages:
        raise UserError(f"there must be at least one stage: {', '.join(STAGES)}")
    check_counts(m=m)
    for name, value, least, most in (
        ("replicates", replicates, 2, MOST_REPLICATES),
        ("agents", agents, 1, config.experiment.fleet.agents),
        ("seed", seed, 0, 2**32 - 1),
        ("reference", reference, LEAST_REFERENCE, MOST_REFERENCE),
    ):
        if not whole(value) or not least <= value <= most:
            raise UserError(f"{name} must be a whole number from {least} to {most}; it is {value!r}")


def replicate(
    estimator: Estimator, baselines: tuple[Baseline, ...], policy: Any, points: Sequence[Point], m: int
) -> tuple[list[ErrorMoments], float]:
    """The moments of an estimator at each point, and the microseconds per estimate."""
    found, seconds = [], []
    number = baselines.index(estimator.subtracted)
    # The first call may compile, so it is not timed.
    for point in (CALLS * list(points))[: max(len(points), CALLS)]:
        began = time.perf_counter()
        estimates = _estimates(policy, point.at, number, estimator.curvature, baselines, m, estimator.quantity)
        estimates.block_until_ready()
        seconds.append((time.perf_counter() - began) / len(point.at.keys))
        found.append(moments(np.asarray(estimates), np.asarray(point.truth[estimator.quantity])))
    return found[: len(points)], 1e6 * float(np.median(seconds[1:]))


def rows(
    points: Sequence[Point], found: Sequence[tuple[Estimator, list[ErrorMoments], float]]
) -> tuple[EstimatorRow, ...]:
    """The rows of all estimators, stage by stage."""
    made = []
    for stage, round_ in dict.fromkeys((point.stage, point.round) for point in points):
        here = [i for i, point in enumerate(points) if point.stage == stage]
        paper = {e.quantity: [of[i] for i in here] for e, of, _ in found if e.is_paper}
        for estimator, of, microseconds in found:
            own = [of[i] for i in here]
            share = ratio(own, paper[estimator.quantity])
            made.append(EstimatorRow(stage, round_, estimator, error(own), share, microseconds))
    return tuple(made)


@dataclass(frozen=True)
class OneOf:
    """One of several baselines, selected by a traced number, so that one compiled program serves all of them."""

    baselines: tuple[Baseline, ...]
    number: Any

    def __call__(
        self, policy: Any, params: Params, batch: Trajectory, returns: Float[Array, "m T"], discount: float
    ) -> Float[Array, "m T"]:
        def values(baseline: Baseline) -> Float[Array, "m T"]:
            said = baseline(policy, params, batch, returns, discount)
            return jnp.zeros_like(returns) if said is None else said

        return jax.lax.switch(self.number, [partial(values, baseline) for baseline in self.baselines])


def estimate_many(
    policy: Any,
    at: EstimateInputs,
    number: Whole,
    curvature: Curvature,
    baselines: tuple[Baseline, ...],
    m: int,
    quantity: str,
) -> Float[Array, "replicate d"]:
    """One estimate per key: sequentially on a CPU, as in training, vectorized elsewhere."""
    agent = Sampled(policy, curvature, OneOf(baselines, number))(at.task)

    def one(key: Any) -> Float[Array, " d"]:
        product = quantity == CURVATURE
        made = agent.curvature(at.theta, at.v, key, m) if product else agent.gradient(at.theta, key, m)
        return flat(jax.tree.map(lambda x, share: x * share, made, at.counted))

    return jax.lax.map(one, at.keys) if jax.default_backend() == "cpu" else jax.vmap(one)(at.keys)


_estimates = jit(estimate_many, static_argnums=(3, 4, 5, 6))
