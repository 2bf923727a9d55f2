"""Plans of comparisons: one fleet, one budget, several methods; read from TOML and checked before any run."""

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from perfedrl.algorithms import ALGORITHMS, Algorithm
from perfedrl.envs import Fleet
from perfedrl.errors import UserError
from perfedrl.estimators import BASELINE
from perfedrl.experiments.config import Config
from perfedrl.experiments.settings import read_table, validated
from perfedrl.own_modules import find_modules_in
from perfedrl.studies.compare.methods import METHODS, Method
from perfedrl.studies.compare.own_methods import find_method

MOST_TRIALS, MOST_BUDGET = 10_000, 1_000_000


class ComparisonPlan(BaseModel):
    """A comparison: all methods train on the fleet with the same budget, with settings chosen on the tuning fleet.

    `budget` is the number of trajectories per agent and round, `trials` the number of settings that each method tries,
    `search` the ranges of the step sizes. `tuning` overrides keys of `fleet` to make the tuning fleet, none of whose
    agents may be tested. Plans of one `family` differ in their `level`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

    name: str
    family: str = ""
    level: float | None = None
    seeds: int = Field(default=10, ge=2, le=1000)
    rounds: int = Field(ge=1)
    evaluations: int = Field(default=10, ge=1)
    budget: int = Field(ge=1)
    local_steps: int = Field(default=5, ge=1, le=1000)
    trials: int = Field(default=8, ge=1, le=MOST_TRIALS)
    tuning_seeds: tuple[int, ...] = (1000, 1001)
    search_seed: int = Field(default=0, ge=0)
    methods: tuple[str, ...] | None = None
    search: dict[str, tuple[float, float]]
    fleet: dict[str, Any]
    tuning: dict[str, Any]
    policy: dict[str, Any]
    evaluation: dict[str, Any]
    baseline: str = BASELINE
    entropy: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @field_validator("search")
    @classmethod
    def _search(cls, ranges: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        if set(ranges) != {"alpha", "beta"}:
            raise UserError(
                f"the table [search] needs alpha = [low, high] and beta = [low, high], and no others; it has "
                f"{', '.join(ranges) or 'none'}: other weights have ranges of their own"
            )
        for name, (low, high) in ranges.items():
            if not 0 < low <= high < float("inf"):
                raise UserError(f"search.{name} must be [low, high] with 0 < low <= high; it is {[low, high]}")
        return ranges

    @field_validator("methods")
    @classmethod
    def _methods(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if names is not None and not names:
            raise UserError("methods must name at least one method; leave it out to compare all")
        for name in names or ():
            find_method(name)
        return names

    @cached_property
    def digest(self) -> str:
        """Ten hex digits that identify the plan except for its name, family, level and methods."""
        content = self.model_dump(mode="json", exclude={"name", "family", "level", "methods"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.digest}"

    @cached_property
    def entrants(self) -> dict[str, Method]:
        """The methods of the comparison: those in `methods`, or all that work with the fleet."""
        names = self.methods or tuple(name for name in METHODS if name not in self.unfit)
        return {name: find_method(name) for name in names}

    @cached_property
    def unfit(self) -> dict[str, str]:
        """The methods, of those in `methods` or of all, that do not work with the fleet or the budget, and why."""
        found = {}
        for name in self.methods or METHODS:
            try:
                self.config(name, self._middle(find_method(name))).experiment  # noqa: B018
            except UserError as error:
                found[name] = str(error)
        return found

    def config(self, method: str, settings: Mapping[str, float], tuning: bool = False) -> Config:
        """The config of one method with some settings, on the test fleet or the tuning fleet."""
        entrant = find_method(method)
        counts = entrant.split(self.budget, self.local_steps)
        for name, count in counts.items():
            if count < 1:
                raise UserError(
                    f"{method}: a budget of {self.budget} trajectories a round is too small for one local step "
                    f"({name} would be {count}); the least that works is {self.least(entrant)}"
                )
        own = {k: v for k, v in settings.items() if "." not in k}
        algorithm = {"name": entrant.algorithm, **entrant.fixed, **counts, **own}
        tables = {name: dict(x) if isinstance(x, Mapping) else x for name, x in entrant.tables.items()}
        for key, value in settings.items():
            table, _, name = key.partition(".")
            if name and not isinstance(tables.get(table), dict):
                raise UserError(f"{method}: the setting {key!r} needs a table {table!r} among the method's tables")
            if name:
                tables[table][name] = value
        return validated(
            Config,
            {
                "name": f"{self.name}-{file_name(method)}",
                "seeds": list(self.tuning_seeds) if tuning else self.seeds,
                "rounds": self.rounds,
                "evaluate_every": max(1, self.rounds // self.evaluations),
                "start": "per-seed",
                "baseline": self.baseline,
                "entropy": self.entropy,
                "fleet": self._fleet(entrant, tuning),
                "policy": self.policy,
                "evaluation": self.evaluation,
                "algorithm": algorithm,
                **tables,
            },
            "config",
        )

    def _fleet(self, method: Method, tuning: bool) -> dict[str, Any]:
        """The table of the fleet, without held-out agents for methods that serve no unseen agents."""
        table = {**self.fleet, **(self.tuning if tuning else {})}
        if not serves_unseen(method.algorithm) and "held_out" in table:
            table["held_out"] = [] if isinstance(table["held_out"], list) else 0
        return table

    def least(self, method: Method) -> int:
        """The smallest budget with at least one trajectory in each batch, by doubling and bisection."""

        def works(budget: int) -> bool:
            return min(method.split(budget, self.local_steps).values()) >= 1

        low, high = 0, 1
        while not works(high):
            low, high = high, 2 * high
            if high > MOST_BUDGET:
                raise UserError(f"{method.title}: no budget gives it a trajectory in each batch")
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if works(middle) else (middle, high)
        return high

    def ranges(self, method: Method) -> dict[str, tuple[float, float]]:
        """The searched settings of a method with their ranges."""
        return {name: self.search[name.removeprefix("deployment_")] for name in method.steps} | dict(method.search)

    def _middle(self, method: Method) -> dict[str, float]:
        """The geometric middle of each searched range."""
        return {name: float(np.sqrt(low * high)) for name, (low, high) in self.ranges(method).items()}

    def check(self) -> None:
        """Reject plans that cannot be compared fairly, before any run."""
        if set(self.tuning_seeds) & set(range(self.seeds)) or not self.tuning_seeds:
            raise UserError(f"tuning_seeds must be at least one seed, none of them a test seed 0 .. {self.seeds - 1}")
        if not self.tuning:
            raise UserError(
                "the table [tuning] is empty; give keys of [fleet] that make other agents, such as seed = 1: tuning on "
                "the tested agents would favour methods that fit them best"
            )
        for name in self.methods or ():
            if name in self.unfit:
                raise UserError(self.unfit[name])
        if not self.entrants:
            raise UserError(f"no method works with this fleet: {next(iter(self.unfit.values()))}")
        first, entrant = next(iter(self.entrants.items()))
        fleets = [self.config(first, self._middle(entrant), tuning).experiment.fleet for tuning in (False, True)]
        if shared := common_agents(*fleets):
            raise UserError(f"[tuning] has {shared} of the agents that are tested; change its seed, goals or ranges")


def file_name(method: str) -> str:
    """The name of a method in names of files and runs, which have no colon."""
    return method.replace(":", ".")


def serves_unseen(name: str) -> bool:
    """Whether agents that never took part can personalize under a registered algorithm."""
    made = ALGORITHMS[name]
    return not (isinstance(made, type) and issubclass(made, Algorithm)) or made.serves_unseen


def common_agents(one: Fleet, other: Fleet) -> int:
    """The number of agents of one fleet that are also in another; 0 for fleets that are not traceable."""
    if not (one.traceable and other.traceable):
        return 0
    rows = [[bytes(agent) for agent in agents(fleet)] for fleet in (one, other)]
    return sum(agent in rows[1] for agent in rows[0])


def agents(fleet: Fleet) -> list[bytes]:
    """The parameters of each agent as bytes."""
    found = []
    for part in (fleet.train, fleet.held_out):
        if part is not None:
            leaves = [np.asarray(x, float) for x in jax.tree.leaves(part)]
            found += [b"".join(x[i].tobytes() for x in leaves) for i in range(len(leaves[0]))]
    return found


def check_levels(levels: Any, fleet: Any) -> None:
    """Check that [levels] has lists of equal length, the first one of numbers, and that [fleet] is a table."""
    if not isinstance(fleet, dict):
        raise UserError("the plan needs a table [fleet]")
    lists: list[Any] = list(levels.values()) if isinstance(levels, dict) else [None]
    if not all(isinstance(x, list) and x for x in lists) or len({len(x) for x in lists}) > 1:
        raise UserError("the table [levels] needs lists of one length, one value for each comparison")
    if lists and not all(isinstance(x, int | float) for x in lists[0]):
        raise UserError("the first list of [levels] must be of numbers, which the comparisons are named after")


def load_plans(path: str | Path) -> list[ComparisonPlan]:
    """The plans in a TOML file: one, or one for each of its levels.

    A table [levels] has lists of equal length: the i-th values, put into the fleet's table, make the i-th plan. Modules
    of the user's own methods are found in the folder of the file too.
    """
    path = Path(path)
    table = read_table(path, "comparison")
    find_modules_in(path.parent)
    try:
        levels = table.pop("levels", {})
        check_levels(levels, table.get("fleet"))
        plans = []
        for i in range(len(next(iter(levels.values()))) if levels else 1):
            own = {name: values[i] for name, values in levels.items()}
            more: dict[str, Any] = {"fleet": {**table.get("fleet", {}), **own}}
            if own:
                level, family = next(iter(own.values())), table.get("name", "")
                more |= {"name": f"{family}-{level:g}", "family": family, "level": level}
            plans.append(validated(ComparisonPlan, {**table, **more}, "plan"))
        for plan in plans:
            plan.check()
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return plans
