"""Warnings about settings that are valid but can hardly be meant, such as a step size of 1e30."""

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("perfedrl")

LARGEST, SMALLEST = 1e6, 1e-12
MEANT_FOR_GAE = ("promp", "fedppo", "per-fedavg-trpo", "context")
"""Algorithms whose settings are meant for normalized advantages."""

SWITCHES = ("clip", "limit", "largest")
"""Beginnings of the names of bounds, which are set very large to switch them off."""


def warn_of_implausible_settings(config: Any) -> None:
    """Warn about step sizes and other weights of a config with which training cannot work."""
    tables = {**config.algorithm, "entropy": config.entropy}
    if config.server is not None:
        tables["rate"] = config.server.rate
    for sentence in [*implausible(tables), *unscaled_steps(config.algorithm, config.advantage, config.policy)]:
        log.warning("%s: %s", config.name, sentence)


def unscaled_steps(algorithm: Mapping[str, Any], advantage: Mapping[str, Any], policy: Mapping[str, Any]) -> list[str]:
    """One sentence where steps depend on the unit of rewards, or on the width of a Gaussian policy."""
    if algorithm["name"] not in MEANT_FOR_GAE:
        return []
    if advantage["name"] != "gae":
        return [f'the steps of {algorithm["name"]} depend on the unit of rewards; set advantage = "gae"']
    if policy["name"] == "gaussian-mlp" and not advantage["times_variance"]:
        return ["adaptation steps depend on the policy's standard deviation; set times_variance = true in [advantage]"]
    return []


def implausible(settings: Mapping[str, Any]) -> list[str]:
    """One sentence for each number that is too large or too small to be meant."""
    found = []
    for name, value in settings.items():
        if not isinstance(value, float) or name.startswith(SWITCHES):
            continue
        if abs(value) > LARGEST:
            found.append(f"{name} = {value:g} can hardly be meant, since numbers soon overflow; is it a typing error?")
        elif 0 < abs(value) < SMALLEST:
            found.append(f"{name} = {value:g} can hardly be meant, since it changes nothing; is it a typing error?")
    return found
