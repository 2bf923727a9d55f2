"""From a config's tables to an experiment: each table is checked against its registry and its part is built."""

import dataclasses
import inspect
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from perfedrl.algorithms import (
    AGGREGATIONS,
    ALGORITHMS,
    ATTACKS,
    Aggregation,
    Algorithm,
    Attack,
    Attacked,
    ControlVariate,
    FedOpt,
    Personal,
    Private,
    Robust,
)
from perfedrl.algorithms.checks import check_agents, check_algorithm
from perfedrl.algorithms.composition import Layer, compose
from perfedrl.algorithms.wrapper import check_federated
from perfedrl.envs import ENVS, Fleet
from perfedrl.errors import UserError
from perfedrl.estimators import ADVANTAGES, BASELINES, CURVATURES, Advantage, Curvature, Sampled
from perfedrl.experiments.normalization import check_curvature, normalize, personal_moments
from perfedrl.experiments.plausibility import warn_of_implausible_settings
from perfedrl.experiments.start_parameters import StartTable, start_parameters
from perfedrl.policies import POLICIES, Policy, sighted
from perfedrl.registry import Registry, abbreviated
from perfedrl.simulation.evaluation import EVALUATIONS, Evaluation, check_estimates
from perfedrl.simulation.experiment import Experiment

MOST_AGENTS = 1_000_000
AGENT_COUNTS = ("agents", "goals", "held_out")
"""The settings of a fleet that are numbers of agents, if they are whole numbers."""

SEES = "sees"
"""The key of the table [policy] that names the parameters of its own task that an agent sees."""

PLAIN_MEAN = MappingProxyType({"name": "mean"})
"""The table [aggregation] of the mean without weights."""

KINDS: Mapping[str, Registry] = MappingProxyType(
    {
        "fleet": ENVS,
        "policy": POLICIES,
        "algorithm": ALGORITHMS,
        "evaluation": EVALUATIONS,
        "curvature": CURVATURES,
        "baseline": BASELINES,
        "advantage": ADVANTAGES,
        "aggregation": AGGREGATIONS,
        "attack": ATTACKS,
    }
)
"""The registries of the tables that name a part."""


class Privacy(BaseModel):
    """The table [privacy]: the clipping length of uploads, the noise as a multiple of it, and delta."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clip: float = Field(gt=0, allow_inf_nan=False)
    noise: float = Field(ge=0, allow_inf_nan=False)
    delta: float = Field(default=1e-5, gt=0, lt=1)


class ControlVariateTable(BaseModel):
    """The table [control_variate]: whether uploads or local steps are corrected, and the rate of the memory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["round", "step"] = "round"
    memory: float = Field(gt=0, le=1)


class Server(BaseModel):
    """The table [server]: the optimizer that steps along a round's mean displacement."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer: Literal["sgd", "momentum", "adam", "yogi", "adagrad"]
    rate: float = Field(gt=0, allow_inf_nan=False)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    b1: float = Field(default=0.9, ge=0, lt=1)
    b2: float = Field(default=0.99, ge=0, lt=1)
    eps: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    anneal: int | None = Field(default=None, ge=1)
    schedule: Literal["linear", "cosine"] = "linear"


def build(config: Any, fleet: Fleet | None = None) -> Experiment:
    """Build the experiment that a config describes; mistakes are found here, before anything compiles.

    A given fleet takes the place of the one that the config's table describes.
    """
    if isinstance(config.evaluate_every, tuple) and config.evaluate_every[-1] != config.rounds:
        last = config.evaluate_every[-1]
        raise UserError(f"evaluate_every must end with the last round, {config.rounds}, got {last}")
    warn_of_implausible_settings(config)
    fleet = make_fleet(config) if fleet is None else fleet
    if SEES in config.policy:
        fleet = sighted(fleet, config.policy[SEES])
    policy = POLICIES[config.policy["name"]](fleet=fleet, **without(config.policy, "name", SEES))
    check_kind(policy, Policy, "policy", config.policy["name"])
    algorithm = unwrapped_algorithm(config)
    algorithm.check_supports(fleet, policy)
    policy = normalize(config.normalization, fleet, policy, algorithm)
    agent = Sampled(
        policy,
        make_part(config.curvature, CURVATURES),
        make_part(config.baseline, BASELINES),
        config.entropy,
        make_part(config.advantage, ADVANTAGES),
    )
    check_kind(agent.forms.curvature, Curvature, "curvature estimator", config.curvature["name"])
    check_kind(agent.forms.advantage, Advantage, "advantage", config.advantage["name"])
    check_curvature(policy, agent.forms.curvature)
    check_estimates(fleet, agent, algorithm.smallest_curvature_batch)
    evaluation = EVALUATIONS[config.evaluation["name"]](fleet=fleet, agent=agent, **without(config.evaluation, "name"))
    check_kind(evaluation, Evaluation, "evaluation", config.evaluation["name"])
    if not algorithm.serves_unseen and fleet.held_out is not None:
        raise UserError(f"{config.algorithm['name']} learns nothing for held-out agents; remove them from the fleet")
    wrapped, weights = wrap(config, algorithm, fleet.agents), agent_weights(config)
    start = config.start
    if isinstance(start, StartTable):
        start = start_parameters(start, policy)
        for seed in config.seeds:
            start.row(seed)
    return Experiment(fleet, policy, wrapped, agent, evaluation, weights, config.participation, start)


def make_fleet(config: Any) -> Fleet:
    """Make the fleet that a config describes."""
    env = config.fleet["env"]
    for name in AGENT_COUNTS:
        count = config.fleet.get(name)
        if isinstance(count, int) and count > MOST_AGENTS:
            raise UserError(f"the fleet {env!r}: {name} must be at most {MOST_AGENTS}; it is {count}")
    try:
        fleet = ENVS[env](**without(config.fleet, "env"))
    except MemoryError as error:
        raise UserError(f"the fleet {env!r} does not fit into memory: {error}; make it smaller") from error
    check_kind(fleet, Fleet, "environment", env)
    return fleet


def unwrapped_algorithm(config: Any) -> Algorithm:
    """The algorithm that a config names, without wrappers."""
    algorithm = ALGORITHMS[config.algorithm["name"]](**without(config.algorithm, "name"))
    check_algorithm(algorithm, config.algorithm["name"])
    return algorithm


def agent_weights(config: Any) -> Any:
    """The agents' weights in the server's mean; None where all are equal."""
    return (config.aggregation or {}).get("weights")


def wrap(config: Any, algorithm: Algorithm, agents: int) -> Algorithm:
    """Put the wrappers that a config asks for around its algorithm, for so many training agents."""
    moments, weights = config.normalization, agent_weights(config)
    check_agents(algorithm, agents, weights)
    total = float(agents if weights is None else sum(weights))
    return compose(
        algorithm,
        layers_of(config, algorithm, total),
        name=config.algorithm["name"],
        averages_moments=moments is not None and "federated" in (moments.observations, moments.rewards),
    )


def layers_of(config: Any, algorithm: Algorithm, total: float) -> list[Layer]:
    """The wrappers that a config asks for, from inside to outside."""
    layers = []
    if algorithm.federated and (names := personal_moments(config.normalization)):
        layers.append(Layer(Personal, {"names": names}))
    if config.privacy is not None:
        layers.append(Layer(Private, {"clip": config.privacy.clip, "noise": config.privacy.noise}))
    if config.aggregation not in (None, PLAIN_MEAN):
        aggregation = make_part(config.aggregation, AGGREGATIONS, "weights")
        check_kind(aggregation, Aggregation, "aggregation", config.aggregation["name"])
        check_federated(algorithm, "upload to aggregate")
        if config.aggregation["name"] != "mean":
            layers.append(Layer(Robust, {"aggregation": aggregation}))
    if config.server is not None:
        layers.append(Layer(FedOpt, config.server.model_dump()))
    if config.control_variate is not None:
        layers.append(Layer(ControlVariate, {"total": total, **config.control_variate.model_dump()}))
    if config.attack is not None:
        attack = make_part(config.attack, ATTACKS, "agents")
        check_kind(attack, Attack, "attack", config.attack["name"])
        layers.append(Layer(Attacked, {"attack": attack, "agents": config.attack["agents"]}))
    return layers


def seen_names(value: Any) -> tuple[str, ...]:
    """Check the names of the parameters that agents see: one, or a list without duplicates."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UserError(f'policy: sees must be a list of names such as ["goal"], got {abbreviated(value)}')
    if len(set(names)) < len(names):
        raise UserError(f"policy: sees names a parameter twice: {', '.join(names)}")
    return tuple(names)


def name_and_parameters(table: Mapping[str, Any], key: str, what: str, known: Registry) -> tuple[str, dict[str, Any]]:
    """Split a table into the name of its part and the parameters."""
    if not isinstance(table.get(key), str):
        raise UserError(f'the table [{what}] needs {key} = "...", one of: {", ".join(known)}')
    return table[key], without(table, key)


def complete_table(value: Any, what: str, known: Registry, besides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Complete a table that names a part, or a bare name, with the part's default parameters.

    Keys in `besides` belong to the table but are not parameters of the part; lists among them become tuples.
    """
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, dict):
        raise UserError(
            f"{what} must be a name, or a table with a name, got {abbreviated(value)}; known: {', '.join(known)}"
        )
    name, params = name_and_parameters(table, "name", what, known)
    extra = {key: params.pop(key) for key in besides if params.get(key) is not None}
    frozen = {key: tuple(x) if isinstance(x, list | tuple) else x for key, x in extra.items()}
    return {"name": name, **known.resolve(name, params), **frozen}


def make_part(table: Mapping[str, Any], known: Registry, *besides: str) -> Any:
    """Make the part that a table describes; keys in `besides` are not its parameters."""
    return known[table["name"]](**without(table, "name", *besides))


def without_defaults(table: dict[str, Any], known: Registry) -> dict[str, Any]:
    """Remove the parameters of a part that have their default values."""
    first = next(iter(table))
    defaults = {key: p.default for key, p in known.parameters(table[first]).items()}

    def is_default(key: str, value: Any) -> bool:
        default = defaults.get(key, inspect.Parameter.empty)
        # Through JSON, since a table holds lists where a signature may hold tuples.
        return default is not inspect.Parameter.empty and json.loads(json.dumps(default, default=str)) == value

    return {key: value for key, value in table.items() if key == first or not is_default(key, value)}


def without(table: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """A copy of a table without some keys."""
    return {k: v for k, v in table.items() if k not in keys}


def check_kind(part: Any, kind: type, what: str, name: str) -> None:
    """Reject a part that is not an instance of the class that its kind requires."""
    if not isinstance(part, kind):
        base = "" if kind is Fleet else f" (subclass {kind.__module__}.{kind.__name__})"
        raise UserError(
            f"the {what} {name!r} must make a perfedrl {kind.__name__}; it made a {type(part).__name__}{base}"
        )


def traced_settings(algorithm: Algorithm) -> set[str]:
    """The settings of an algorithm that are leaves of its pytree, and so may differ within one compiled program."""
    kind = type(algorithm)
    if not dataclasses.is_dataclass(kind):
        return set()
    return {field.name for field in dataclasses.fields(kind) if not field.metadata.get("static", False)}
