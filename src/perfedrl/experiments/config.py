"""What to run: a frozen, validated config, read from TOML and identified by a digest."""

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from perfedrl.algorithms import ALGORITHMS, Algorithm
from perfedrl.envs import ENVS, Fleet
from perfedrl.envs.arrays import file_digest
from perfedrl.errors import UserError, nearest
from perfedrl.estimators import CURVATURES
from perfedrl.policies import POLICIES

TRACED = ("alpha", "beta")
"""Parameters of an algorithm that runs compiled together may differ in."""


class Config(BaseModel):
    """One experiment: a fleet, a policy, an algorithm, and how long and how often.

    Each of the three parts is a table whose first key names it (`env` for the fleet, `name` for the others); the rest
    are its parameters. Defaults are filled in when the config is made, so equal experiments have equal digests.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seeds: tuple[int, ...]
    rounds: int = Field(ge=1)
    evaluate_every: int = Field(default=1, ge=1)
    fleet: dict[str, Any]
    policy: dict[str, Any]
    algorithm: dict[str, Any]
    curvature: str = "score"

    @field_validator("seeds", mode="before")
    @classmethod
    def _seeds(cls, value: Any) -> Any:
        """A number N stands for the seeds 0 .. N-1."""
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 1:
                raise ValueError(f"there must be at least one seed, not {value}")
            return tuple(range(value))
        if isinstance(value, list | tuple):
            if not value or len(set(value)) < len(value):
                raise ValueError("the list of seeds must not be empty or name a seed twice")
            if any(not isinstance(seed, int) or not 0 <= seed < 2**32 for seed in value):
                raise ValueError("seeds must be whole numbers from 0 to 2**32 - 1")
        return value

    @field_validator("fleet")
    @classmethod
    def _fleet(cls, table: dict[str, Any]) -> dict[str, Any]:
        env, params = _named(table, "env", "fleet")
        if env == "arrays" and params.get("file"):
            params = {**params, "sha256": file_digest(params["file"])}
        return {"env": env, **ENVS.resolve(env, params)}

    @field_validator("policy")
    @classmethod
    def _policy(cls, table: dict[str, Any]) -> dict[str, Any]:
        name, params = _named(table, "name", "policy")
        return {"name": name, **POLICIES.resolve(name, params, supplied=("fleet",))}

    @field_validator("algorithm")
    @classmethod
    def _algorithm(cls, table: dict[str, Any]) -> dict[str, Any]:
        name, params = _named(table, "name", "algorithm")
        return {"name": name, **ALGORITHMS.resolve(name, params)}

    @field_validator("curvature")
    @classmethod
    def _curvature(cls, name: str) -> str:
        CURVATURES[name]
        return name

    @cached_property
    def digest(self) -> str:
        """Ten hex digits that identify everything but the name."""
        content = self.model_dump(mode="json", exclude={"name"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]

    @property
    def folder(self) -> str:
        """The name of the run's folder."""
        return f"{self.name}-{self.digest}"

    @property
    def compiles_with(self) -> str:
        """Configs that agree in this string share one compiled program: they differ in seeds and step sizes only."""
        content = self.model_dump(mode="json", exclude={"name", "seeds"})
        content["algorithm"] = {k: v for k, v in content["algorithm"].items() if k not in TRACED}
        return json.dumps(content, sort_keys=True)

    def build(self) -> "Parts":
        """Make the parts; whatever is wrong with them is said here, before anything compiles."""
        fleet = ENVS[self.fleet["env"]](**_params(self.fleet, "env"))
        policy = POLICIES[self.policy["name"]](fleet=fleet, **_params(self.policy, "name"))
        algorithm = ALGORITHMS[self.algorithm["name"]](**_params(self.algorithm, "name"))
        return Parts(fleet, policy, algorithm)

    def to_toml(self) -> str:
        """The config as TOML, defaults included; reading it back gives an equal config."""
        return tomli_w.dumps(_without_none(self.model_dump(mode="json")))


@dataclass(frozen=True)
class Parts:
    """What a config describes."""

    fleet: Fleet
    policy: Any
    algorithm: Algorithm


def load_config(path: str | Path) -> Config:
    """Read a config from a TOML file."""
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"there is no config {path}") from error
    except (IsADirectoryError, PermissionError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a config: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    try:
        return make_config(table)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def make_config(table: Mapping[str, Any]) -> Config:
    """Check a table of settings; the error is one sentence about the first thing wrong."""
    for key in table:
        if key not in Config.model_fields:
            raise UserError(f"unknown key {key!r}{nearest(key, Config.model_fields)}")
    try:
        config = Config(**table)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise UserError(f"the config lacks {where!r}") from error
        message = first["msg"].removeprefix("Value error, ")
        told = message if isinstance(first.get("ctx", {}).get("error"), UserError) else f"{where}: {message.lower()}"
        raise UserError(told if first["type"] == "value_error" else f"{told}, not {first['input']!r}") from error
    config.build()
    return config


def _named(table: Mapping[str, Any], key: str, what: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(table.get(key), str):
        raise UserError(f'the table [{what}] needs {key} = "..."{nearest(key, table) if table else ""}')
    return table[key], {k: v for k, v in table.items() if k != key}


def _params(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in table.items() if k != key}


def _without_none(value: Any) -> Any:
    """TOML has no null: a parameter that is None is left out, which means the same."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return value
