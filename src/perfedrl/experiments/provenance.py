"""Where a run came from: versions, device, commit, duration."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from perfedrl.experiments.store import FORMAT

PACKAGES = ("perfedrl", "jax", "jaxlib", "equinox", "optax", "numpy")


def provenance(seconds: float) -> dict[str, Any]:
    """Describe this machine and this code, with the seconds that a run took on it."""
    device = jax.local_devices()[0]
    return {
        "format": FORMAT,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 3),
        "commit": commit(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "device": f"{len(jax.local_devices())} x {device.device_kind} ({device.platform})",
        "system": f"{platform.system()} {platform.machine()}",
    }


def commit() -> str | None:
    """The commit of the source tree that this code runs from, marked when it has changes; None when installed."""
    here = Path(__file__).resolve().parent

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", here, *args], capture_output=True, text=True, check=True, timeout=5).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".").strip()
        return git("rev-parse", "HEAD").strip() + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
