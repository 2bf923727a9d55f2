"""The folders in which a config's own modules are found: that of its file, and those that its run has recorded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfedrl.experiments.own_code import code_names
from perfedrl.own_modules import find_modules_in

RECORD, KEY = "provenance.json", "own_modules"


def find_named_modules(path: Path, table: Mapping[str, Any]) -> None:
    """Let modules that a config names be found beside its file, and where they were when its run was trained.

    A recorded folder counts only if it still has the module.
    """
    if not code_names(table):
        return
    find_modules_in(path.parent)
    for module, folder in recorded_folders(path.parent).items():
        if (folder / f"{module}.py").is_file() or (folder / module).is_dir():
            find_modules_in(folder)


def recorded_folders(run: Path) -> dict[str, Path]:
    """The folders of a run's own modules by name; none in the folder of a run without them, or of no run."""
    try:
        recorded = json.loads((run / RECORD).read_text(encoding="utf-8"))[KEY]
        return {module: Path(folder) for module, folder in recorded.items() if module.isidentifier()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def as_record(folders: Mapping[str, str]) -> dict[str, Any]:
    """The part of a run's provenance that `recorded_folders` reads; empty without own modules."""
    return {KEY: dict(folders)} if folders else {}
