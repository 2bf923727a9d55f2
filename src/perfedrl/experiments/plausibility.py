"""Warnings about settings that are valid but can hardly be meant, such as a step size of 1e30."""

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("perfedrl")

LARGEST, SMALLEST = 1e6, 1e-12
SWITCHES = ("clip", "limit", "largest")
"""Beginnings of the names of bounds, which are set very large to switch them off."""


def warn_of_implausible_settings(config: Any) -> None:
    """Warn about step sizes and other weights of a config with which training cannot work."""
    tables = {**config.algorithm, "entropy": config.entropy}
    if config.server is not None:
        tables["rate"] = config.server.rate
    for sentence in implausible(tables):
        log.warning("%s: %s", config.name, sentence)


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
