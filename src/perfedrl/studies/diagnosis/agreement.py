"""What following a diagnosis costs: the recommended mechanism's result in a full comparison, beside the best one."""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from perfedrl.experiments.stats import Interval, mean_interval
from perfedrl.studies.compare import ComparisonPlan, Entry
from perfedrl.studies.compare.comparison import decoded
from perfedrl.studies.diagnosis.verdict import CLUSTERS, FINE_TUNING, NEGLIGIBLE, ONE_STEP, SHARED

METHOD_OF: Mapping[str, str] = {
    SHARED: "fedavg-pg",
    ONE_STEP: "first-order",
    CLUSTERS: "clustered",
    FINE_TUNING: "fine-tuned",
}
"""The compared method that does what a diagnosis recommends."""

FROM_SCRATCH = "from-scratch"
FILE = "diagnoses.json"
"""What was recommended for the compared fleets by name, beside the results of the comparisons."""


class Regret(NamedTuple):
    """What a recommended method falls short of the best one, as a share of what learning is worth."""

    method: str
    best: str
    lost: Interval
    """Over seeds, of differences paired by seed."""

    @property
    def right(self) -> bool:
        """Whether the loss is negligible, or not distinguishable from none."""
        return self.lost.mean <= NEGLIGIBLE or self.lost.low <= 0


def unseen_agents(entry: Entry) -> Float[np.ndarray, " seed"]:
    """The mean return of unseen agents over all budgets of their own trajectories; nan where there are none."""
    own = entry.budgets > 0
    return entry.held_out[:, own].mean(axis=1) if own.any() else np.full(len(entry.after), np.nan)


def training_agents(entry: Entry) -> Float[np.ndarray, " seed"]:
    """The mean return of training agents after personalization, at the end."""
    return entry.after[:, -1]


def untrained_return(entries: Mapping[str, Entry]) -> float:
    """The mean return of unseen agents under the policy that training starts from."""
    entry = entries[FROM_SCRATCH]
    return float(entry.held_out[:, entry.budgets == 0].mean())


def regret(
    entries: Mapping[str, Entry], recommendation: str, training: bool = False, among: Collection[str] | None = None
) -> Regret:
    """Compare what was recommended with the best of all compared methods, for unseen or for training agents.

    Learning is worth the best method's mean return minus that of the untrained policy. `among` restricts the methods.
    """
    measure = training_agents if training else unseen_agents
    returns = {name: measure(entry) for name, entry in entries.items()}
    finite = {name: x for name, x in returns.items() if np.isfinite(x).all() and (among is None or name in among)}
    best = max(finite, key=lambda name: float(finite[name].mean()))
    worth = float(finite[best].mean()) - untrained_return(entries)
    method = METHOD_OF[recommendation]
    return Regret(method, best, mean_interval((finite[best] - finite[method]) / worth))


def read_entries(folder: str | Path) -> dict[str, Entry]:
    """All results in the folder of one comparison, by method."""
    return {entry.method: entry for entry in map(decoded, sorted(Path(folder).glob("*.json")))}


def regrets(
    plans: Iterable[ComparisonPlan],
    results: str | Path,
    training: bool = False,
    among: Collection[str] | None = None,
) -> dict[str, Regret]:
    """The regret of each plan's saved recommendation, by the name of the plan."""
    root = Path(results)
    recommended = json.loads((root / FILE).read_text(encoding="utf-8"))
    return {
        plan.name: regret(read_entries(root / plan.folder), recommended[plan.name]["recommendation"], training, among)
        for plan in plans
    }
