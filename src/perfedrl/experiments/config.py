"""The config of a run: frozen, validated, read from TOML and identified by a digest."""

import hashlib
import json
import warnings
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, field_validator

from perfedrl.algorithms import AGGREGATIONS, ALGORITHMS, ATTACKS, unwrapped
from perfedrl.algorithms.control_variate import MEMORY
from perfedrl.envs import ENVS, Fleet
from perfedrl.envs.arrays import file_digest
from perfedrl.errors import UserError
from perfedrl.estimators import ADVANTAGE, ADVANTAGES, BASELINE, BASELINES, CURVATURE, CURVATURES
from perfedrl.experiments.build import (
    KINDS,
    PLAIN_MEAN,
    SEES,
    ControlVariateTable,
    Privacy,
    Server,
    build,
    complete_table,
    name_and_parameters,
    seen_names,
    traced_settings,
    without_defaults,
)
from perfedrl.experiments.module_folders import find_named_modules
from perfedrl.experiments.normalization import Normalization
from perfedrl.experiments.own_code import changed_code, code_digests, code_names, module_folders, without_source
from perfedrl.experiments.settings import read_table, resolve_fleet_file, resolve_start, validated
from perfedrl.experiments.start_parameters import StartTable, complete_start
from perfedrl.experiments.trust import check_trusted
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
    start: int | Literal["per-seed"] | StartTable = 0
    keep: Literal["last", "best"] = "last"
    extensible: bool = True
    fleet: dict[str, Any]
    policy: dict[str, Any]
    algorithm: dict[str, Any]
    evaluation: dict[str, Any] = Field(default={"name": "auto"}, validate_default=True)
    curvature: dict[str, Any] = Field(default={"name": CURVATURE}, validate_default=True)
    baseline: dict[str, Any] = Field(default={"name": BASELINE}, validate_default=True)
    advantage: dict[str, Any] = Field(default={"name": ADVANTAGE}, validate_default=True)
    entropy: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    participation: float = Field(default=1.0, gt=0, le=1)
    normalization: Normalization | None = None
    aggregation: dict[str, Any] | None = None
    control_variate: ControlVariateTable | None = None
    server: Server | None = None
    privacy: Privacy | None = None
    attack: dict[str, Any] | None = None
    code: dict[str, str] | None = Field(default=None, validate_default=True)

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
        """A number, "per-seed", or the folder of a run, whose parameters count by their content."""
        if value == "per-seed" or isinstance(value, StartTable) or (whole(value) and 0 <= value < 2**32):
            return value
        if isinstance(value, str | dict):
            return complete_start(value)
        raise UserError(
            f'start must be a whole number from 0 to 2**32 - 1, "per-seed", or the folder of a run, '
            f"got {abbreviated(value)}"
        )

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
        sees = seen_names(params.pop(SEES, ()))
        return {"name": name, **POLICIES.resolve(name, params, supplied=("fleet",)), **({SEES: sees} if sees else {})}

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

    @field_validator("advantage", mode="before")
    @classmethod
    def _advantage(cls, value: Any) -> dict[str, Any]:
        return complete_table(value, "advantage", ADVANTAGES)

    @field_validator("aggregation", mode="before")
    @classmethod
    def _aggregation(cls, value: Any) -> dict[str, Any] | None:
        """The table with its defaults; without it a simulation takes the mean, and a network its own default."""
        return None if value is None else complete_table(value, "aggregation", AGGREGATIONS, ("weights",))

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

    @field_validator("code")
    @classmethod
    def _code(cls, digests: dict[str, str] | None, info: Any) -> dict[str, str] | None:
        """The digests of own code that the config names: those of a saved config, or of the code that is here now."""
        return digests or code_digests(_tables(info.data)) or None

    @field_validator("normalization")
    @classmethod
    def _normalization(cls, table: Normalization | None) -> Normalization | None:
        """A table that normalizes nothing equals a config without the table."""
        return None if table is None or table.observations == table.rewards == "none" else table

    @cached_property
    def digest(self) -> str:
        """Ten hex digits that identify everything but the name; a file of arrays and own code count by their content.

        Settings at their defaults are left out, so that a new setting does not change the digests of older configs.
        """
        return _short_digest(self._content())

    @property
    def digest_without_code(self) -> str:
        """The digest of earlier versions, which did not count own code."""
        return _short_digest({key: value for key, value in self._content().items() if key != "code"})

    @property
    def code_without_source(self) -> list[str]:
        """The names of own code whose source is not found, so that a change of it goes unnoticed."""
        return without_source(_tables(dict(self)))

    @property
    def changed_code(self) -> list[str]:
        """The names of own code that is not the code with which this config was saved."""
        return changed_code(_tables(dict(self)), self.code or {})

    @property
    def code_names(self) -> list[str]:
        """The names of code, `module:attribute`, in the config."""
        return code_names(self.table)

    @property
    def module_folders(self) -> dict[str, str]:
        """The folders of own modules that the config names, by the name of the module; installed ones have none."""
        return module_folders(_tables(dict(self)))

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

    def with_fleet(self, fleet: Fleet) -> "Config":
        """This config with its experiment built on another fleet than its table describes."""
        other = self.model_copy()
        other.__dict__["experiment"] = build(self, fleet)
        return other

    @property
    def parts(self) -> Experiment:
        """The old name of `experiment`."""
        warnings.warn("Config.parts is now Config.experiment", DeprecationWarning, stacklevel=2)
        return self.experiment

    def to_toml(self, start_path: str | None = None, **fleet: Any) -> str:
        """The config as TOML, defaults included; reading it back gives an equal config.

        `fleet` replaces settings of the fleet, `start_path` the path of the start parameters.
        """
        content = self.table
        content["fleet"] |= fleet
        if start_path is not None:
            content["start"]["path"] = start_path
        return tomli_w.dumps(content)

    @property
    def table(self) -> dict[str, Any]:
        """The config as a table, defaults included."""
        return _without_none(self.model_dump(mode="json"))

    def with_rounds(self, rounds: int) -> "Config":
        """The same config with more or fewer rounds; of rounds in `evaluate_every`, those before the last stay."""
        every = self.evaluate_every
        if isinstance(every, tuple):
            every = (*(stop for stop in every if stop < rounds), rounds)
        return parse_config({**self.table, "rounds": rounds, "evaluate_every": every})

    def _content(self) -> dict[str, Any]:
        content = self.model_dump(mode="json", exclude={"name"}, exclude_defaults=True)
        if content["fleet"].get("sha256"):
            content["fleet"].pop("file")
        if isinstance(content.get("start"), dict):
            content["start"].pop("path")
        if content.get("aggregation") == PLAIN_MEAN:  # what a config without the table means
            del content["aggregation"]
        for part, known in KINDS.items():
            if part in content:
                content[part] = without_defaults(content[part], known)
        if self.fleet["env"] == "gymnasium":
            content["fleet"] = self._with_scaling(content["fleet"])
        return content

    def _with_scaling(self, fleet: dict[str, Any]) -> dict[str, Any]:
        """State scaled actions, although they are the default, and leave out unscaled ones, which once were it.

        So a run with unscaled actions keeps its digest, and is not taken for one with scaled actions. The policy `mlp`
        chooses among discrete actions, for which the setting means nothing.
        """
        scaled = self.fleet["scale_actions"] and self.policy["name"] != "mlp"
        rest = {key: value for key, value in fleet.items() if key != "scale_actions"}
        return {**rest, "scale_actions": True} if scaled else rest


def _tables(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tables of a config that name parts, without the names of files."""
    return [{k: v for k, v in settings[part].items() if k != "file"} for part in KINDS if settings.get(part)]


def _short_digest(content: Mapping[str, Any]) -> str:
    """The first ten hex digits of the sha256 of a table."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def load_config(path: str | Path, *, trust: bool = False) -> Config:
    """Read a config from a TOML file and build its experiment, so that mistakes are found before any work.

    Reading imports the code that a config names. That of a run which this user did not train on this machine is
    imported only with `trust`.
    """
    config = read_config(path, trust=trust)
    try:
        config.experiment  # noqa: B018
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return config


def read_config(path: str | Path, *, trust: bool = False, known: Collection[str] = ()) -> Config:
    """Read a config from a TOML file and check its settings; its experiment is built on first use.

    A file that the config names is looked for in the config's own folder, a run to start from also in the current one.
    Modules of the user's own are found there too, and those of a run where they were when it was trained. A run's code
    is imported if the run is the user's own, if it is among the `known` names, or with `trust`.
    """
    path = Path(path)
    table = resolve_start(path, resolve_fleet_file(path, read_table(path, "config")))
    if not trust:
        check_trusted(path, table, known)
    if trust or not known:  # modules of known names have been found
        find_named_modules(path, table)
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
