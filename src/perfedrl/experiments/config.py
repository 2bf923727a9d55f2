"""The config of a run: frozen, validated, read from TOML and identified by a digest."""

import hashlib
import json
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, field_validator

from perfedrl.algorithms import AGGREGATIONS, ALGORITHMS, ATTACKS, unwrapped
from perfedrl.algorithms.control_variate import MEMORY
from perfedrl.envs import ENVS
from perfedrl.envs.arrays import file_digest
from perfedrl.errors import UserError
from perfedrl.estimators import BASELINE, BASELINES, CURVATURE, CURVATURES
from perfedrl.experiments.build import (
    KINDS,
    ControlVariateTable,
    Privacy,
    Server,
    build,
    complete_table,
    name_and_parameters,
    traced_settings,
    without_defaults,
)
from perfedrl.experiments.normalization import Normalization
from perfedrl.experiments.settings import read_table, resolve_fleet_file, validated
from perfedrl.policies import POLICIES
from perfedrl.registry import abbreviated
from perfedrl.simulation.evaluation import EVALUATIONS
from perfedrl.simulation.experiment import Experiment
from perfedrl.simulation.simulator import every_few

MOST_SEEDS, MOST_ROUNDS = 100_000, 1_000_000_000
TRACED = {"privacy": {"clip", "noise", "delta"}, "server": {"rate"}, "control_variate": {"memory"}}
"""Settings of tables that may differ between runs of one compiled program, like an algorithm's step sizes."""


class Config(BaseModel):
    """One experiment: a fleet, a policy, an algorithm, an evaluation, seeds and rounds.

    Each of the parts is a table whose first key names it (`env` for the fleet, `name` for the others); the rest are its
    parameters. Parameters' defaults are filled in when the config is made, so spelling them out changes no digest.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", ignored_types=(cached_property,), ser_json_inf_nan="constants"
    )

    name: str
    seeds: tuple[int, ...]
    rounds: int = Field(ge=1, le=MOST_ROUNDS)
    evaluate_every: int | tuple[int, ...] = 1
    start: int | Literal["per-seed"] = 0
    fleet: dict[str, Any]
    policy: dict[str, Any]
    algorithm: dict[str, Any]
    evaluation: dict[str, Any] = Field(default={"name": "auto"}, validate_default=True)
    curvature: dict[str, Any] = Field(default={"name": CURVATURE}, validate_default=True)
    baseline: dict[str, Any] = Field(default={"name": BASELINE}, validate_default=True)
    entropy: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    participation: float = Field(default=1.0, gt=0, le=1)
    normalization: Normalization | None = None
    aggregation: dict[str, Any] | None = None
    control_variate: ControlVariateTable | None = None
    server: Server | None = None
    privacy: Privacy | None = None
    attack: dict[str, Any] | None = None

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not name or not all(c.isascii() and (c.isalnum() or c in "._-") for c in name) or not name[0].isalnum():
            raise UserError(
                f"name must consist of letters, digits, '.', '_' and '-', as a folder's name, got {abbreviated(name)}"
            )
        return name

    @field_validator("seeds", mode="before")
    @classmethod
    def _seeds(cls, value: Any) -> Any:
        """A number N stands for the seeds 0 .. N-1."""
        if whole(value):
            value = range(value) if 0 <= value <= MOST_SEEDS else [None]
        if not isinstance(value, list | tuple | range) or not all(whole(x) and 0 <= x < 2**32 for x in value):
            raise UserError(
                f"seeds must be a number from 1 to {MOST_SEEDS} or a list of whole numbers from 0 to 2**32 - 1"
            )
        if not value or len(set(value)) < len(value):
            raise UserError("there must be at least one seed, and no seed may be listed twice")
        return tuple(value)

    @field_validator("evaluate_every", mode="before")
    @classmethod
    def _evaluate_every(cls, value: Any) -> Any:
        """A number of rounds between evaluations, or the rounds themselves."""
        stops = value if isinstance(value, list | tuple) else [value]
        if not stops or not all(whole(x) and x >= 1 for x in stops) or list(stops) != sorted(set(stops)):
            raise UserError(
                "evaluate_every must be a number of rounds, at least 1, or an increasing list of rounds, "
                f"got {abbreviated(value)}"
            )
        return tuple(value) if isinstance(value, list) else value

    @field_validator("start", mode="before")
    @classmethod
    def _start(cls, value: Any) -> Any:
        if value != "per-seed" and not (whole(value) and 0 <= value < 2**32):
            raise UserError(
                f'start must be a whole number from 0 to 2**32 - 1, or "per-seed", got {abbreviated(value)}'
            )
        return value

    @field_validator("fleet")
    @classmethod
    def _fleet(cls, table: dict[str, Any]) -> dict[str, Any]:
        env, params = name_and_parameters(table, "env", "fleet", ENVS)
        if env == "arrays" and params.get("file") and not params.get("sha256"):
            params = {**params, "sha256": file_digest(params["file"])}
        return {"env": env, **ENVS.resolve(env, params)}

    @field_validator("policy")
    @classmethod
    def _policy(cls, table: dict[str, Any]) -> dict[str, Any]:
        name, params = name_and_parameters(table, "name", "policy", POLICIES)
        return {"name": name, **POLICIES.resolve(name, params, supplied=("fleet",))}

    @field_validator("algorithm")
    @classmethod
    def _algorithm(cls, table: dict[str, Any]) -> dict[str, Any]:
        name, params = name_and_parameters(table, "name", "algorithm", ALGORITHMS)
        return {"name": name, **ALGORITHMS.resolve(name, params)}

    @field_validator("evaluation")
    @classmethod
    def _evaluation(cls, table: dict[str, Any]) -> dict[str, Any]:
        name, params = name_and_parameters(table, "name", "evaluation", EVALUATIONS)
        return {"name": name, **EVALUATIONS.resolve(name, params, supplied=("fleet", "agent"))}

    @field_validator("curvature", mode="before")
    @classmethod
    def _curvature(cls, value: Any) -> dict[str, Any]:
        return complete_table(value, "curvature", CURVATURES)

    @field_validator("baseline", mode="before")
    @classmethod
    def _baseline(cls, value: Any) -> dict[str, Any]:
        return complete_table(value, "baseline", BASELINES)

    @field_validator("aggregation", mode="before")
    @classmethod
    def _aggregation(cls, value: Any) -> dict[str, Any] | None:
        """A mean without weights is the default, and equals a config without the table."""
        table = {"name": "mean"} if value is None else complete_table(value, "aggregation", AGGREGATIONS, ("weights",))
        return None if table == {"name": "mean"} else table

    @field_validator("control_variate", mode="before")
    @classmethod
    def _control_variate(cls, value: Any) -> Any:
        """A bare mode stands for the table; the memory is always part of it, and so of the digest."""
        table = {"mode": value} if isinstance(value, str) else value
        return {"memory": MEMORY, **table} if isinstance(table, dict) else table

    @field_validator("attack", mode="before")
    @classmethod
    def _attack(cls, value: Any) -> dict[str, Any] | None:
        if value is None:
            return None
        table = complete_table(value, "attack", ATTACKS, ("agents",))
        if not whole(table.get("agents")) or table["agents"] < 1:
            raise UserError(
                "the table [attack] needs agents = ..., the number of attackers among the last training agents"
            )
        return table

    @field_validator("normalization")
    @classmethod
    def _normalization(cls, table: Normalization | None) -> Normalization | None:
        """A table that normalizes nothing equals a config without the table."""
        return None if table is None or table.observations == table.rewards == "none" else table

    @cached_property
    def digest(self) -> str:
        """Ten hex digits that identify everything but the name; a file of arrays counts by its content.

        Settings at their defaults are left out, so that a new setting does not change the digests of older configs.
        """
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()[:10]

    @property
    def stops(self) -> list[int]:
        """The rounds after which the run is measured."""
        every = self.evaluate_every
        return every_few(self.rounds, every) if isinstance(every, int) else list(every)

    @property
    def folder(self) -> str:
        """The name of the run's folder."""
        return f"{self.name}-{self.digest}"

    @cached_property
    def trains_with(self) -> str:
        """Configs that agree in this string train side by side: they differ in seeds and step sizes only."""
        content = self._content()
        del content["seeds"]
        for part, traced in {"algorithm": traced_settings(unwrapped(self.experiment.algorithm)), **TRACED}.items():
            if part in content:
                content[part] = {k: v for k, v in content[part].items() if k not in traced}
        # The program depends on which optional step sizes are set.
        content["set"] = str(jax.tree.structure(self.experiment.algorithm))
        # A default rate follows from the step sizes.
        content["rate"] = self.experiment.policy.rate if self.normalization else None
        return json.dumps(content, sort_keys=True)

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment that the config describes, built once; mistakes are found here, before anything compiles."""
        return build(self)

    @property
    def parts(self) -> Experiment:
        """The old name of `experiment`."""
        warnings.warn("Config.parts is now Config.experiment", DeprecationWarning, stacklevel=2)
        return self.experiment

    def to_toml(self, **fleet: Any) -> str:
        """The config as TOML, defaults included; reading it back gives an equal config. `fleet` replaces settings."""
        content = self.model_dump(mode="json")
        content["fleet"] |= fleet
        return tomli_w.dumps(_without_none(content))

    def _content(self) -> dict[str, Any]:
        content = self.model_dump(mode="json", exclude={"name"}, exclude_defaults=True)
        if content["fleet"].get("sha256"):
            content["fleet"].pop("file")
        for part, known in KINDS.items():
            if part in content:
                content[part] = without_defaults(content[part], known)
        return content


def load_config(path: str | Path) -> Config:
    """Read a config from a TOML file and build its experiment, so that mistakes are found before any work."""
    config = read_config(path)
    try:
        config.experiment  # noqa: B018
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return config


def read_config(path: str | Path) -> Config:
    """Read a config from a TOML file and check its settings; its experiment is built on first use.

    A file that the config names is looked for in the config's own folder.
    """
    path = Path(path)
    table = resolve_fleet_file(path, read_table(path, "config"))
    try:
        return parse_config(table)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def make_config(table: Mapping[str, Any]) -> Config:
    """Check a table of settings and build its experiment; the error is one sentence about the first mistake."""
    config = parse_config(table)
    config.experiment  # noqa: B018
    return config


def parse_config(table: Mapping[str, Any]) -> Config:
    """Check a table of settings; its experiment is built on first use."""
    return validated(Config, table, "config")


def whole(x: Any) -> bool:
    """Whether x is an integer; True and False are not."""
    return isinstance(x, int) and not isinstance(x, bool)


def _without_none(value: Any) -> Any:
    """Remove parameters that are None, which TOML cannot express; leaving them out means the same."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return value
