"""Arrays that a study measures once and keeps beside the runs, in files named by a digest of how they were made."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perfedrl.errors import UserError
from perfedrl.experiments.files import named_leaves, npz, read_npz, write_atomically
from perfedrl.types import Progress

Arrays = dict[str, np.ndarray]
"""The leaves of a measurement's result by their paths: "errors.policy", say."""


class Measurement(NamedTuple):
    """A slow function with the settings that determine its result, which must be JSON values."""

    name: str
    function: Callable[..., Any]
    settings: Mapping[str, Any]

    def file(self, study: str) -> str:
        """The file name: study, measurement, and a digest of the function's name and its settings."""
        made = {"function": self.function.__qualname__, "settings": dict(self.settings)}
        digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:10]
        return "-".join([study, *re.findall(r"\w+", self.name), digest]) + ".npz"


class MeasurementCache(NamedTuple):
    """A folder of measurement files. Missing files are an error where `only_saved`; `restart` measures all again."""

    root: Path
    only_saved: bool = False
    restart: bool = False

    def load(
        self, study: str, measurements: Iterable[Measurement], progress: Progress = lambda _: None
    ) -> dict[str, Arrays]:
        """Return the arrays of a study's measurements by name, measuring and saving those that are missing."""
        found = {}
        for one in measurements:
            path = self.root / one.file(study)
            if self.restart or not path.is_file():
                if self.only_saved:
                    raise UserError(f"{self.root} has no measurement {path.name}; make it, or leave out --saved")
                progress(one.name)
                write_atomically(path, npz(named_leaves(one.function(**one.settings))))
            found[one.name] = read_npz(path, dict)
        return found
