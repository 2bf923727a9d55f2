"""What NVFlare writes to its logs: to standard output only, which its owner rotates, and no lines for every round."""

import json
from typing import Any

CHATTY = (
    "nvflare.apis.impl.wf_comm_server",
    "nvflare.private.fed.client.client_run_manager",
    "nvflare.private.fed.client.client_runner",
    "nvflare.private.fed.client.communicator",
    "nvflare.private.fed.client.fed_client",
    "nvflare.private.fed.client.fed_client_base",
    "nvflare.private.fed.server.server_commands",
    "nvflare.private.fed.server.server_runner",
)
"""The modules that say several things of every agent in every round."""


def log_config(default: str) -> dict[str, Any]:
    """A logging configuration in Python's format, made of NVFlare's own, which writes everything four times."""
    config: dict[str, Any] = json.loads(default)
    config["loggers"] = {name: {"level": "WARNING"} for name in CHATTY}
    config["loggers"]["root"] = {"level": "INFO", "handlers": ["consoleHandler"]}
    config["handlers"] = {"consoleHandler": {**config["handlers"]["consoleHandler"], "formatter": "baseFormatter"}}
    return config
