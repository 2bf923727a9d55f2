"""The provenance of a run: versions, device, commit and duration."""

import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from perfedrl.experiments.store import FORMAT

PACKAGES = ("perfedrl", "jax", "jaxlib", "equinox", "optax", "numpy")
OPTIONAL = ("gymnasium", "mujoco")
"""Packages that are recorded where they are installed."""


def provenance(seconds: float) -> dict[str, Any]:
    """Describe this machine, this code, and the duration of a run."""
    device = jax.local_devices()[0]
    return {
        "format": FORMAT,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 3),
        "commit": commit(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        **installed_versions(OPTIONAL),
        "device": f"{len(jax.local_devices())} x {device.device_kind} ({device.platform})",
        "system": f"{platform.system()} {platform.machine()}",
    }


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed; a folder of a package's name is not the package."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def commit() -> str | None:
    """The commit of the source tree, with "+changes" if it was modified; None for an installed package."""
    here = Path(__file__).resolve().parent

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", here, *args], capture_output=True, text=True, check=True, timeout=5).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".").strip()
        return git("rev-parse", "HEAD").strip() + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
