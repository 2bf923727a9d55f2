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
from perfedrl.experiments.own_code import code_digests
from perfedrl.experiments.provenance import provenance
from perfedrl.experiments.stats import over_agents
from perfedrl.experiments.store import Run, made_or_read
from perfedrl.experiments.training import train
from perfedrl.simulation.observers import Observer, Part
from perfedrl.simulation.simulator import every_few
from perfedrl.studies.compare.own_methods import is_own
from perfedrl.studies.compare.plan import ComparisonPlan, file_name
from perfedrl.studies.compare.tuning import Trial, best, search

DIGITS = 4
MADE = ("finished", "seconds", "commit", "perfedrl", "jax", "python", "device")


class NoResultsError(UserError):
    """Raised where only saved results are to be shown and there are none."""


@dataclass(frozen=True)
class Entry:
    """One method's result: the trials, the chosen settings, and the returns of each seed.

    `after` is the mean over training agents after personalization at each evaluation, `worst` the worst agent at the
    end; `held_out` has the returns of unseen agents by budget. Agents that could not be measured do not count. A method
    that diverged on a test seed has nan.
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
    from_disk: frozenset[str] = frozenset()
    """The methods whose results were read and not made by this call."""
    missing: tuple[str, ...] = ()
    """The methods without a result, where only saved results were read."""

    @property
    def origin(self) -> str:
        """How many results were made and how many were read from disk, and when those were made."""
        dates = sorted(self.entries[name].made["finished"][:10] for name in self.from_disk)
        return made_or_read("results", len(self.entries) - len(dates), dates)

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
    is trained, and methods without a result are `missing`; it is an error if all are. `observers` are told of each
    method that is tuned and trained, as a part of the comparison, and of its runs.
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
    names = list(only or plan.entrants)
    paths = {name: folder / f"{file_name(name)}.json" for name in names}
    todo = [name for name in names if not is_current(plan, name, paths[name], saved)]
    if saved and todo == names:
        raise NoResultsError(f"{folder} has no results of {', '.join(names)}; run the comparison without --saved")
    made = set()
    for number, name in enumerate(() if saved else todo, start=1):
        if is_current(plan, name, paths[name], saved):
            continue  # another process made it meanwhile
        waiting = len(todo) - number
        part = Part(plan.name, name, len(names) - waiting, len(names), waiting, "methods")
        for observer in observers:
            observer.on_part(part)
        write_atomically(paths[name], encoded(enter(plan, name, Path(runs), observers)))
        made.add(name)
    missing = tuple(todo) if saved else ()
    entries = {name: decoded(path) for name, path in paths.items() if name not in missing}
    return Comparison(plan, entries, frozenset(entries.keys() - made), missing)


def is_current(plan: ComparisonPlan, name: str, path: Path, saved: bool) -> bool:
    """Whether a method's result is there and belongs to the method as it is now.

    A result from before a change of own code is made again; with `saved`, and for the library's own methods, it is an
    error.
    """
    if not path.exists():
        return False
    entry, own = decoded(path), is_own(name)
    current = entry.made.get("code", {}) == code_of(name)
    if current:  # else the settings may be those of other code
        try:
            config = plan.config(name, entry.settings)
            current, own = entry.made.get("run") == config.folder, own or config.code is not None
        except UserError:  # the method no longer has these settings
            current = False
    if not current and (saved or not own):
        again = "run the comparison without --saved" if own else "remove it and run the comparison again"
        raise UserError(f"{path} is of another version of {name}; {again}")
    return current


def code_of(name: str) -> dict[str, str]:
    """The digest of the source of a user's own method; empty for the library's methods."""
    return code_digests([{"name": name}]) if is_own(name) else {}


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
    if code := code_of(name):
        made["code"] = code
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
        held_out = over_agents(run.deployment.outcomes["return"])
    return Entry(
        name,
        trials,
        settings,
        history.trajectories.astype(float),
        history.bytes.astype(float),
        over_agents(history.after),
        np.fmin.reduce(history.after[:, -1], axis=-1),
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
