"""Agents' answers to one question of the server: how they are collected, and how they are read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax
import numpy as np

from perfedrl.envs import BaseTask
from perfedrl.federation.environment_report import ReportedTask
from perfedrl.federation.frames import FAILED_EPISODES, BadFrame, Frame, decode
from perfedrl.federation.server.upload_checks import ROUNDING, printable
from perfedrl.simulation.experiment import Experiment
from perfedrl.simulation.history import History
from perfedrl.simulation.simulator import RETURNS

FAR = 100.0
MOST_OUTCOMES, LONGEST_COUNT = 64, 9
"""The largest number of outcomes in one answer, and of digits in a count."""


@dataclass
class Answers:
    """The encoded answers to one question and the reasons of failed agents, both by agent name."""

    asked: tuple[str, ...]
    frames: dict[str, bytes] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    late: tuple[str, ...] = ()
    """Agents that answered an earlier question after it was closed."""
    late_uploads: dict[str, bytes] = field(default_factory=dict)
    """The answers of those agents, where the question was an update."""

    @property
    def silent(self) -> set[str]:
        """The agents that neither answered nor failed."""
        return set(self.asked) - set(self.frames) - set(self.failures)


class AskAgents(Protocol):
    """Send a frame to all agents but `without`, and wait until `enough(answers)`, all have answered, or the deadline.

    The deadline is in seconds.
    """

    def __call__(
        self, kind: str, frame: bytes, without: set[str], enough: Callable[[Answers], bool], deadline: float
    ) -> Answers: ...


def of_kind(answers: Answers, kind: str) -> tuple[dict[str, Frame], dict[str, str]]:
    """Decode the answers of one kind; return them and the reasons why the others were rejected."""
    accepted: dict[str, Frame] = {}
    refused: dict[str, str] = {}
    for name, data in answers.frames.items():
        try:
            frame = decode(data)
        except BadFrame as error:
            refused[name] = str(error)
            continue
        if frame.kind == kind:
            accepted[name] = frame
        else:
            unexpected = f"expected an answer of kind {kind!r}, got {frame.kind!r}"
            refused[name] = printable(frame.fields.get("message", unexpected))
    return accepted, refused


def outcomes_in(data: bytes | None, kind: str = "outcomes") -> dict[str, float] | None:
    """The outcomes in an agent's answer, e.g. "after.return"; None for a missing or malformed answer."""
    if data is None:
        return None
    try:
        frame = decode(data)
    except BadFrame:
        return None
    scalars = {name: x for name, x in frame.tensors.items() if x.shape == () and x.dtype == np.float64}
    fine = 0 < len(scalars) <= MOST_OUTCOMES and all(np.isfinite(x) for x in scalars.values())
    if frame.kind != kind or len(scalars) < len(frame.tensors) or not fine:
        return None
    return {name: float(x) for name, x in scalars.items()}


def largest_return(task: BaseTask) -> float:
    """The largest absolute return of an episode; infinite where rewards are unbounded."""
    if task.reward_bound is None:
        return float("inf")
    return float(task.reward_bound) * float(np.sum(float(task.discount) ** np.arange(task.horizon + 1)))


def unbelievable(outcomes: Mapping[str, float], limit: float) -> str | None:
    """Why reported outcomes cannot be true, given the largest possible return; None if they can."""
    for when in ("before.return", "after.return"):
        if abs(outcomes.get(when, 0.0)) > limit * (1 + ROUNDING):
            return f"it reports {when} = {outcomes[when]:.3g}, and no return is larger than {limit:.3g}"
    return None


def outlier(returns: Mapping[str, float]) -> str | None:
    """The agent whose return is farthest from the median, if the mean says nothing of the others because of it.

    That is the case if it is more than `FAR` times as far as the median agent, and moves the mean away from the median
    by more than the median's own size. Of less than three agents none is an outlier.
    """
    known = {name: x for name, x in returns.items() if np.isfinite(x)}
    if len(known) < 3:
        return None
    values = np.array(list(known.values()))
    median = float(np.median(values))
    name, far = max(((name, abs(x - median)) for name, x in known.items()), key=lambda item: item[1])
    moved = abs(float(np.mean(values)) - median)
    return name if far > FAR * float(np.median(np.abs(values - median))) and moved > abs(median) else None


def epsilon_in(data: bytes) -> float | None:
    """The privacy loss that an agent reports with its upload, maybe infinite; None if it is missing or invalid."""
    try:
        epsilon = float(decode(data).fields.get("epsilon", "nan"))
    except (BadFrame, ValueError):
        return None
    return epsilon if epsilon >= 0 else None


def failed_episodes_in(data: bytes) -> int:
    """The number of failed episodes that an agent reports with its upload; 0 if it is missing or invalid."""
    try:
        count = decode(data).fields.get(FAILED_EPISODES, "")
    except BadFrame:
        return 0
    return int(count) if count.isascii() and count.isdigit() and len(count) <= LONGEST_COUNT else 0


def outcome_names(experiment: Experiment) -> list[str]:
    """The names of the outcomes that agents of this experiment report: "before.return", "after.success" and so on."""
    task, key = experiment.fleet.task(0), jax.random.key(0)
    if isinstance(task, ReportedTask):
        names = {"return", *task.report.outcomes}
    else:
        params = experiment.policy.init(key)
        names = set(jax.eval_shape(experiment.evaluation.outcomes, task, params, key))
    return [f"{when}.{name}" for when in ("before", "after") for name in sorted(names)]


def history_of(
    reported: Mapping[str, Mapping[str, float]],
    names: Sequence[str],
    round_: int,
    experiment: Experiment,
    seeds: Sequence[int],
) -> History:
    """The history of one evaluation; missing outcomes are NaN, and unknown ones are dropped."""
    arrays = {
        outcome: np.array([[[reported.get(name, {}).get(outcome, np.nan) for name in names]]])
        for outcome in outcome_names(experiment)
    }
    nobody = np.zeros((1, 1, 0))
    returns = {when: arrays.pop(f"{when}.return", nobody) for when in RETURNS}
    return History(
        seeds=np.asarray(seeds),
        rounds=np.asarray([round_]),
        **experiment.cost_after(round_),
        **returns,
        outcomes=arrays,
    )
