"""Arrays that a study measures once and keeps beside the runs, in files named by a digest of how they were made."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from perfedrl.errors import UserError
from perfedrl.experiments.files import named_leaves, npz, read_npz, write_atomically
from perfedrl.experiments.store import Run
from perfedrl.types import Progress

NO_RUNS: Mapping[Any, Run] = MappingProxyType({})

Arrays = dict[str, np.ndarray]
"""The leaves of a measurement's result by their paths: "errors.policy", say."""


class Measurement(NamedTuple):
    """A slow function with the settings that determine its result, which must be JSON values.

    `run` is the key of the study's run that the function takes as its first argument; None where it takes no run.
    """

    name: str
    function: Callable[..., Any]
    settings: Mapping[str, Any]
    run: Any = None

    def file(self, study: str, runs: Mapping[Any, Run] = NO_RUNS) -> str:
        """The file name: study, measurement, and a digest of the function's name, its settings and its run's name."""
        made = {"function": self.function.__qualname__, "settings": dict(self.settings)}
        if self.run is not None:
            made["run"] = runs[self.run].config.folder
        digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:10]
        return "-".join([study, *re.findall(r"\w+", self.name), digest]) + ".npz"


class MeasurementCache(NamedTuple):
    """A folder of measurement files. Missing files are an error where `only_saved`; `restart` measures all again."""

    root: Path
    only_saved: bool = False
    restart: bool = False

    def load(
        self,
        study: str,
        measurements: Iterable[Measurement],
        progress: Progress = lambda _: None,
        runs: Mapping[Any, Run] = NO_RUNS,
    ) -> dict[str, Arrays]:
        """Return the arrays of a study's measurements by name, measuring and saving those that are missing.

        `runs` are the study's runs, for measurements that need one.
        """
        found = {}
        for one in measurements:
            path = self.root / one.file(study, runs)
            if self.restart or not path.is_file():
                if self.only_saved:
                    raise UserError(f"{self.root} has no measurement {path.name}; make it, or leave out --saved")
                progress(one.name)
                measured = () if one.run is None else (runs[one.run],)
                write_atomically(path, npz(named_leaves(one.function(*measured, **one.settings))))
            found[one.name] = read_npz(path, dict)
        return found
