"""Run a plan: tune each method, train it on the test seeds, and save its result in a file of its own."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from perfedrl import exact
from perfedrl.compilation import enable_cache
from perfedrl.envs import TabularMDP
from perfedrl.errors import DivergenceError, UserError
from perfedrl.experiments.files import check_folder, write_atomically
from perfedrl.experiments.provenance import provenance
from perfedrl.experiments.store import Run
from perfedrl.experiments.training import train
from perfedrl.simulation.observers import Observer
from perfedrl.simulation.simulator import every_few
from perfedrl.studies.compare.plan import ComparisonPlan
from perfedrl.studies.compare.tuning import Trial, best, search

DIGITS = 4
MADE = ("finished", "seconds", "commit", "perfedrl", "jax", "python", "device")


@dataclass(frozen=True)
class Entry:
    """One method's result: the trials, the chosen settings, and the returns of each seed.

    `after` is the mean over training agents after personalization at each evaluation, `worst` the worst agent at the
    end; `held_out` has the returns of unseen agents by budget. A method that diverged on a test seed has nan.
    """

    method: str
    trials: list[Trial]
    settings: dict[str, float]
    trajectories: Float[np.ndarray, " evaluation"]
    bytes: Float[np.ndarray, " evaluation"]
    after: Float[np.ndarray, "seed evaluation"]
    worst: Float[np.ndarray, " seed"]
    budgets: Float[np.ndarray, " budget"]
    held_out: Float[np.ndarray, "seed budget"]
    made: dict[str, Any]

    @property
    def diverged(self) -> bool:
        return not np.isfinite(self.after).all()


@dataclass(frozen=True)
class Comparison:
    """The results of all methods on one fleet."""

    plan: ComparisonPlan
    entries: Mapping[str, Entry]

    @cached_property
    def optimum(self) -> float:
        """The mean over training agents of the optimal return; nan for fleets that are not tabular."""
        first = next(iter(self.entries.values()))
        train_ = self.plan.config(first.method, first.settings).experiment.fleet.train
        if not isinstance(train_, TabularMDP):
            return float("nan")
        mdps = [jax.tree.map(lambda x, i=i: x[i], train_) for i in range(len(train_.mu))]
        return float(np.mean([exact.optimal_return(mdp) for mdp in mdps]))

    def measures(self, method: str) -> dict[str, Float[np.ndarray, " seed"]]:
        """All measures of a method by seed."""
        entry = self.entries[method]
        found = {"training": entry.after[:, -1], "worst agent": entry.worst}
        found |= {f"unseen, {m:g}": entry.held_out[:, i] for i, m in enumerate(entry.budgets)}
        for cost in ("trajectories", "bytes"):
            found[f"curve by {cost}"] = self.height(entry, cost)
        if np.isfinite(self.optimum):
            found["gap to the optimum"] = self.optimum - entry.after[:, -1]
        return found

    def height(self, entry: Entry, cost: str) -> Float[np.ndarray, " seed"]:
        """The mean height of the learning curve up to a cost that all methods reach: its area divided by the cost.

        A method without cost has a constant curve; a method that sends no bytes has nan by bytes.
        """
        spent = getattr(entry, cost)
        if cost == "bytes" and spent[-1] == 0:
            return np.full(len(entry.after), np.nan)
        totals = [getattr(other, cost)[-1] for other in self.entries.values()]
        grid = np.linspace(0, min((total for total in totals if total > 0), default=0.0), 201)
        curves = np.asarray([np.interp(grid, spent, row) for row in entry.after])
        return np.trapezoid(curves, axis=1) / (len(grid) - 1)


def compare(
    plan: ComparisonPlan,
    results: str | Path = "comparisons",
    runs: str | Path = "runs",
    *,
    only: Sequence[str] = (),
    saved: bool = False,
    observers: Sequence[Observer] = (),
    compile_cache: bool = True,
) -> Comparison:
    """Compare the methods of a plan, reading the results that exist in `results`.

    `only` restricts the comparison to some methods, so that several processes can share the work. With `saved` nothing
    is trained, and missing results are an error.
    """
    plan.check()
    folder = Path(results) / plan.folder
    check_folder(folder)
    if compile_cache and not saved:
        enable_cache()
    unknown = [name for name in only if name not in plan.entrants]
    if unknown:
        reason = plan.unfit.get(unknown[0], f"the plan has {', '.join(plan.entrants)}")
        raise UserError(f"{unknown[0]!r} does not take part: {reason}")
    entries = {}
    for name in only or plan.entrants:
        path = folder / f"{name}.json"
        if not path.exists():
            if saved:
                raise UserError(f"{folder} has no {name}; run the comparison without --saved")
            write_atomically(path, encoded(enter(plan, name, Path(runs), observers)))
        entries[name] = decoded(path)
        if entries[name].made.get("run") != plan.config(name, entries[name].settings).folder:
            raise UserError(f"{path} is of another version of {name}; remove it and run the comparison again")
    return Comparison(plan, entries)


def enter(plan: ComparisonPlan, name: str, runs: Path, observers: Sequence[Observer]) -> Entry:
    """Tune a method, then train it on the test fleet and seeds with the best settings."""
    began = time.monotonic()
    trials = search(plan, name, observers)
    chosen = best(trials).settings
    config = plan.config(name, chosen)
    try:
        run = train(config, runs, observers=observers, compile_cache=False)
    except DivergenceError:
        run = None
    about = provenance(time.monotonic() - began)
    made = {key: about[key] for key in MADE} | {"run": config.folder}
    return entry_of(name, trials, chosen, plan, run, made)


def entry_of(
    name: str,
    trials: list[Trial],
    settings: dict[str, float],
    plan: ComparisonPlan,
    run: Run | None,
    made: dict[str, Any],
) -> Entry:
    """The entry of a finished run, or of a diverged one where `run` is None."""
    if run is None:
        stops = [0, *every_few(plan.rounds, max(1, plan.rounds // plan.evaluations))]
        none = np.full((plan.seeds, len(stops)), np.nan)
        cost = np.asarray(stops, float) * plan.budget
        empty = np.zeros(0), np.zeros((plan.seeds, 0))
        return Entry(name, trials, settings, cost, cost * 0, none, none[:, 0], *empty, made)
    history, budgets, held_out = run.history, np.zeros(0), np.zeros((len(run.history.seeds), 0))
    if run.deployment is not None and history.held_out_after.shape[-1]:
        budgets = run.deployment.budgets.astype(float)
        held_out = run.deployment.outcomes["return"].mean(axis=-1)
    return Entry(
        name,
        trials,
        settings,
        history.trajectories.astype(float),
        history.bytes.astype(float),
        history.after.mean(axis=-1),
        history.after[:, -1].min(axis=-1),
        budgets,
        held_out,
        made,
    )


def encoded(entry: Entry) -> bytes:
    """An entry as JSON: whole numbers in full, others to four digits, nan and infinity as null."""

    def plain(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return plain(x.tolist())
        if isinstance(x, list | tuple):
            return [plain(y) for y in x]
        if isinstance(x, dict):
            return {key: plain(y) for key, y in x.items()}
        if isinstance(x, float):
            if not np.isfinite(x):
                return None
            return int(x) if x.is_integer() else float(f"{x:.{DIGITS}g}")
        return x

    content = asdict(entry) | {"trials": [{"settings": t.settings, "score": t.score} for t in entry.trials]}
    lines = (
        f"{json.dumps(key)}: {json.dumps(plain(x), allow_nan=False, separators=(',', ':'))}"
        for key, x in content.items()
    )
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def decoded(path: Path) -> Entry:
    """Read an entry from a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        arrays = {
            k: np.asarray(content[k], dtype=object).astype(float)
            for k in ("trajectories", "bytes", "after", "worst", "budgets", "held_out")
        }
        arrays["held_out"] = arrays["held_out"].reshape(len(arrays["after"]), len(arrays["budgets"]))
        trials = [Trial(t["settings"], -np.inf if t["score"] is None else float(t["score"])) for t in content["trials"]]
        return Entry(content["method"], trials, content["settings"], **arrays, made=content["made"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged; remove it and run the comparison again") from error
