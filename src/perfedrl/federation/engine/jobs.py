"""Jobs for NVFlare: they name the workflow, the bridge and the run, and contain no code."""

import json
from collections.abc import Sequence
from pathlib import Path

from perfedrl.federation.engine.nvflare_settings import HEARTBEAT
from perfedrl.federation.engine.provision import BRIDGE, WORKFLOW

REQUEST_INTERVAL = 0.02
"""Seconds between two requests of an agent's bridge for a task; NVFlare's default of 2 is made for long rounds."""

REPLY_TIMEOUT = 15.0
"""Seconds without progress after which an agent's bridge repeats a request to the server; NVFlare waits for 300."""


def write_job(folder: Path, run: str, generation: int, agents: Sequence[str], seconds: float) -> Path:
    """Write the job of one generation of a run; `run` is its folder's name, `seconds` an agent's limit for one task."""
    workflow = {"id": "rounds", "path": WORKFLOW, "args": {"control": run, "generation": generation}}
    server = {
        "format_version": 2,
        "server": {"task_request_interval": REQUEST_INTERVAL},
        "workflows": [workflow],
        "components": [],
    }
    bridge = {"tasks": ["*"], "executor": {"path": BRIDGE, "args": {"seconds": seconds}}}
    client = {
        "format_version": 2,
        "default_task_fetch_interval": REQUEST_INTERVAL,
        "get_task_timeout": REPLY_TIMEOUT,
        "submit_task_result_timeout": REPLY_TIMEOUT,
        "task_check_interval": REQUEST_INTERVAL,
        "job_heartbeat_interval": HEARTBEAT,
        "executors": [bridge],
        "components": [],
        "task_result_filters": [],
        "task_data_filters": [],
    }
    # One agent is enough for NVFlare: the run's own terms say how many a round needs.
    meta = {
        "name": f"{run}-{generation}",
        "resource_spec": {},
        "min_clients": 1,
        "mandatory_clients": [],
        "deploy_map": {"app": ["server", *agents]},
    }
    files = {
        "meta.json": meta,
        "app/config/config_fed_server.json": server,
        "app/config/config_fed_client.json": client,
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return folder
