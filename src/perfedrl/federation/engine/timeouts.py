"""The engine's clocks, set in one place. Its defaults are made for rounds of minutes."""

from typing import Any

from perfedrl.errors import UserError

REQUEST_INTERVAL = 0.02
"""Seconds between two questions of an agent's bridge whether there is work; the engine's default is 2."""

CHECK_PERIOD = 0.005
"""Seconds between two looks of the server at its standing tasks; the engine's default is 0.2."""

_PRIVATE = "_task_check_period"


def hasten(communicator: Any) -> None:
    """Set how often the server looks at its tasks.

    A controller's own `task_check_period` has no effect in NVFlare 2.9: it is written to a public attribute of the
    communicator, which reads a private one.
    """
    if not hasattr(communicator, _PRIVATE):
        raise UserError(f"this NVFlare's communicator has no {_PRIVATE}: perfedrl is made for NVFlare 2.9")
    setattr(communicator, _PRIVATE, CHECK_PERIOD)
