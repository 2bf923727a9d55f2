"""Arrays that an experiment measures once and keeps beside the runs, in files named by how they were made."""

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
"""The leaves of what was measured by their paths: "errors.policy", say."""


class Measurement(NamedTuple):
    """A function that measures for long, and all settings that its numbers depend on, in words of JSON."""

    name: str
    function: Callable[..., Any]
    settings: Mapping[str, Any]

    def file(self, experiment: str) -> str:
        """What it is called: by experiment and name, and by a digest of how it is made."""
        made = {"function": self.function.__qualname__, "settings": dict(self.settings)}
        digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:10]
        return "-".join([experiment, *re.findall(r"\w+", self.name), digest]) + ".npz"


class Kept(NamedTuple):
    """The folder of the files, and whether what is missing, or everything, is measured."""

    root: Path
    only_saved: bool = False
    restart: bool = False

    def __call__(
        self, experiment: str, wanted: Iterable[Measurement], progress: Progress = lambda _: None
    ) -> dict[str, Arrays]:
        """The arrays of an experiment's measurements by name; each is written as soon as it is done."""
        found = {}
        for one in wanted:
            path = self.root / one.file(experiment)
            if self.restart or not path.is_file():
                if self.only_saved:
                    raise UserError(f"{self.root} has no measurement {path.name}; make it, or leave out --saved")
                progress(one.name)
                write_atomically(path, npz(named_leaves(one.function(**one.settings))))
            found[one.name] = read_npz(path, dict)
        return found
