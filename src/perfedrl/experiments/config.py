"""What to run: a frozen, validated config, read from TOML and identified by a digest."""

import dataclasses
import hashlib
import inspect
import json
import tomllib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from perfedrl.algorithms import ALGORITHMS, Algorithm
from perfedrl.envs import ENVS, Fleet
from perfedrl.envs.arrays import file_digest
from perfedrl.errors import UserError, nearest
from perfedrl.estimators import BASELINE, BASELINES, CURVATURE, CURVATURES, Curvature, Sampled
from perfedrl.evaluation import EVALUATIONS, Evaluation, check_estimates
from perfedrl.policies import POLICIES, Policy
from perfedrl.registry import shortened
from perfedrl.simulation import every_few

MOST_SEEDS, MOST_ROUNDS = 100_000, 1_000_000_000


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a config describes."""

    fleet: Fleet
    policy: Any
    agent: Sampled
    algorithm: Algorithm
    evaluation: Evaluation


class Config(BaseModel):
    """One experiment: a fleet, a policy, an algorithm, how it is measured, and how long and how often.

    Each of the parts is a table whose first key names it (`env` for the fleet, `name` for the others); the rest are its
    parameters. Parameters' defaults are filled in when the config is made, so spelling them out changes no digest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

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

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not name or not all(c.isascii() and (c.isalnum() or c in "._-") for c in name) or not name[0].isalnum():
            raise UserError(f"name = {shortened(name)}: use letters, digits, '.', '_' and '-', it names a folder")
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
            raise UserError("there must be at least one seed, and none may be named twice")
        return tuple(value)

    @field_validator("evaluate_every", mode="before")
    @classmethod
    def _evaluate_every(cls, value: Any) -> Any:
        """A number of rounds between evaluations, or the rounds themselves."""
        stops = value if isinstance(value, list | tuple) else [value]
        if not stops or not all(whole(x) and x >= 1 for x in stops) or list(stops) != sorted(set(stops)):
            raise UserError(
                f"evaluate_every = {shortened(value)}: a number of rounds, at least 1, or a rising list of rounds"
            )
        return tuple(value) if isinstance(value, list) else value

    @field_validator("start", mode="before")
    @classmethod
    def _start(cls, value: Any) -> Any:
        if value != "per-seed" and not (whole(value) and 0 <= value < 2**32):
            raise UserError(f'start = {shortened(value)}: a whole number from 0 to 2**32 - 1, or "per-seed"')
        return value

    @field_validator("fleet")
    @classmethod
    def _fleet(cls, table: dict[str, Any]) -> dict[str, Any]:
        env, params = _named(table, "env", "fleet", ENVS)
        if env == "arrays" and params.get("file") and not params.get("sha256"):
            params = {**params, "sha256": file_digest(params["file"])}
        return {"env": env, **ENVS.resolve(env, params)}

    @field_validator("policy")
    @classmethod
    def _policy(cls, table: dict[str, Any]) -> dict[str, Any]:
        name, params = _named(table, "name", "policy", POLICIES)
        return {"name": name, **POLICIES.resolve(name, params, supplied=("fleet",))}

    @field_validator("algorithm")
    @classmethod
    def _algorithm(cls, table: dict[str, Any]) -> dict[str, Any]:
        name, params = _named(table, "name", "algorithm", ALGORITHMS)
        return {"name": name, **ALGORITHMS.resolve(name, params)}

    @field_validator("evaluation")
    @classmethod
    def _evaluation(cls, table: dict[str, Any]) -> dict[str, Any]:
        name, params = _named(table, "name", "evaluation", EVALUATIONS)
        return {"name": name, **EVALUATIONS.resolve(name, params, supplied=("fleet", "agent"))}

    @field_validator("curvature", mode="before")
    @classmethod
    def _curvature(cls, value: Any) -> dict[str, Any]:
        return _form(value, "curvature", CURVATURES)

    @field_validator("baseline", mode="before")
    @classmethod
    def _baseline(cls, value: Any) -> dict[str, Any]:
        return _form(value, "baseline", BASELINES)

    @cached_property
    def digest(self) -> str:
        """Ten hex digits that identify everything but the name. A file of arrays counts by its content.

        Settings at their defaults are left out, so that a new one does not change the digest of what lacks it.
        Run folders hold them all.
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
        traced = _traced(type(self.parts.algorithm))
        content["algorithm"] = {k: v for k, v in content["algorithm"].items() if k not in traced}
        # Which of the optional step sizes are set is part of the program.
        content["set"] = str(jax.tree.structure(self.parts.algorithm))
        return json.dumps(content, sort_keys=True)

    @cached_property
    def parts(self) -> Parts:
        """What the config describes; what is wrong with it is said here, before anything compiles."""
        if isinstance(self.evaluate_every, tuple) and self.evaluate_every[-1] != self.rounds:
            last = self.evaluate_every[-1]
            raise UserError(f"evaluate_every ends with {last}; the last evaluation must be at round {self.rounds}")
        fleet = ENVS[self.fleet["env"]](**_params(self.fleet, "env"))
        _check_kind(fleet, Fleet, "environment", self.fleet["env"])
        policy = POLICIES[self.policy["name"]](fleet=fleet, **_params(self.policy, "name"))
        _check_kind(policy, Policy, "policy", self.policy["name"])
        algorithm = ALGORITHMS[self.algorithm["name"]](**_params(self.algorithm, "name"))
        _check_kind(algorithm, Algorithm, "algorithm", self.algorithm["name"])
        form = lambda table, known: known[table["name"]](**_params(table, "name"))  # noqa: E731
        agent = Sampled(policy, form(self.curvature, CURVATURES), form(self.baseline, BASELINES), self.entropy)
        _check_kind(agent.forms.curvature, Curvature, "curvature estimator", self.curvature["name"])
        check_estimates(fleet, agent, getattr(algorithm, "smallest_curvature_batch", 2))
        evaluation = EVALUATIONS[self.evaluation["name"]](fleet=fleet, agent=agent, **_params(self.evaluation, "name"))
        _check_kind(evaluation, Evaluation, "evaluation", self.evaluation["name"])
        if not getattr(algorithm, "federated", True) and fleet.held_out is not None:
            raise UserError(f"{self.algorithm['name']} learns nothing for held-out agents; leave them out of the fleet")
        return Parts(fleet, policy, agent, algorithm, evaluation)

    def to_toml(self, **fleet: Any) -> str:
        """The config as TOML, defaults included; reading it back gives an equal config. `fleet` replaces settings."""
        content = self.model_dump(mode="json")
        content["fleet"] |= fleet
        return tomli_w.dumps(_without_none(content))

    def _content(self) -> dict[str, Any]:
        content = self.model_dump(mode="json", exclude={"name"}, exclude_defaults=True)
        if content["fleet"].get("sha256"):
            content["fleet"].pop("file")
        for part, known in PARTS.items():
            if part in content:
                content[part] = _spoken(content[part], known)
        return content


PARTS = {
    "fleet": ENVS,
    "policy": POLICIES,
    "algorithm": ALGORITHMS,
    "evaluation": EVALUATIONS,
    "curvature": CURVATURES,
    "baseline": BASELINES,
}


def load_config(path: str | Path) -> Config:
    """Read a config from a TOML file; a file that it names is looked for in the config's own folder."""
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"there is no config {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a config") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    fleet = table.get("fleet")
    if isinstance(fleet, dict) and isinstance(fleet.get("file"), str) and fleet["file"]:
        fleet["file"] = str(path.parent / fleet["file"])
    try:
        return make_config(table)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def make_config(table: Mapping[str, Any]) -> Config:
    """Check a table of settings and build what it describes; the error is one sentence about the first thing wrong."""
    for key in table:
        if key not in Config.model_fields:
            raise UserError(f"unknown key {key!r}{nearest(key, Config.model_fields)}")
    try:
        config = Config.model_validate_json(json.dumps(dict(table), default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        if isinstance(first.get("ctx", {}).get("error"), UserError):
            raise first["ctx"]["error"] from None
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise UserError(f"the config lacks {where!r}") from error
        message = first["msg"][0].lower() + first["msg"][1:]
        raise UserError(f"{where}: {message}, not {shortened(first['input'])}") from error
    config.parts  # noqa: B018
    return config


def whole(x: Any) -> bool:
    """Whether x is a whole number; True and False are none."""
    return isinstance(x, int) and not isinstance(x, bool)


def _named(table: Mapping[str, Any], key: str, what: str, known: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(table.get(key), str):
        raise UserError(f'the table [{what}] needs {key} = "...", one of: {", ".join(known)}')
    return table[key], _params(table, key)


def _form(value: Any, what: str, known: Any) -> dict[str, Any]:
    """A table with a name and parameters; the name alone stands for it with its defaults."""
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, dict):
        raise UserError(f"{what} = {shortened(value)}: a name, or a table with a name, one of: {', '.join(known)}")
    name, params = _named(table, "name", what, known)
    return {"name": name, **known.resolve(name, params)}


def _spoken(table: dict[str, Any], known: Any) -> dict[str, Any]:
    """A part's table without the parameters that have their defaults."""
    first = next(iter(table))
    defaults = {key: p.default for key, p in known.parameters(table[first]).items()}
    plain = lambda x: json.loads(json.dumps(x, default=str))  # noqa: E731
    unset = lambda key: key in defaults and defaults[key] is not inspect.Parameter.empty  # noqa: E731
    return {key: x for key, x in table.items() if key == first or not (unset(key) and plain(defaults[key]) == x)}


def _params(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in table.items() if k != key}


def _check_kind(part: Any, kind: type, what: str, name: str) -> None:
    if not isinstance(part, kind):
        raise UserError(f"the {what} {name!r} must make a perfedrl {kind.__name__}; it made a {type(part).__name__}")


def _traced(algorithm: type) -> set[str]:
    """The settings of an algorithm that are leaves of its pytree, and so may differ within one compiled program."""
    fields = dataclasses.fields(algorithm) if dataclasses.is_dataclass(algorithm) else ()
    return {field.name for field in fields if not field.metadata.get("static", False)}


def _without_none(value: Any) -> Any:
    """TOML has no null: a parameter that is None is left out, which means the same."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return value
