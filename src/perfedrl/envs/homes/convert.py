"""Make `fontana.npz` from the wheel of CityLearn 2.1.2, which has the homes' measurements as CSV files.

    pip download --no-deps citylearn==2.1.2
    python -m perfedrl.envs.homes.convert CityLearn-2.1.2-py3-none-any.whl fontana.npz

The files start with the last hour of a Sunday, 31 July. That row is dropped, and so are the last 23: what remains are
52 weeks from Monday, 1 August. Loads are used as they are; solar generation, in watts per kilowatt of panels, is
multiplied by the size of the home's panels. Both are rounded to `STEP`.
"""

import csv
import io
import json
import sys
import zipfile
from pathlib import Path

import numpy as np

FOLDER = "citylearn/data/citylearn_challenge_2022_phase_all"
WEEKS = 52
STEP = 0.01
"""Resolution of the stored numbers, in kWh."""


def convert(wheel: Path, out: Path) -> None:
    """Write the hourly load and solar generation of all homes, in units of `STEP`, as arrays [home, day, hour]."""
    with zipfile.ZipFile(wheel) as files:
        homes = json.loads(files.read(f"{FOLDER}/schema.json"))["buildings"]
        load, solar = [], []
        for name, home in homes.items():
            table = files.read(f"{FOLDER}/{home['energy_simulation']}").decode()
            rows = list(csv.DictReader(io.StringIO(table)))[1 : 1 + WEEKS * 7 * 24]
            if [float(row["Hour"]) for row in rows] != [*range(1, 25)] * (WEEKS * 7):
                raise ValueError(f"{name}: expected {WEEKS} weeks of whole days after the first row")
            panels = home["pv"]["attributes"]["nominal_power"]
            load.append([float(row["Equipment Electric Power [kWh]"]) for row in rows])
            solar.append([float(row["Solar Generation [W/kW]"]) * panels / 1000 for row in rows])
    np.savez_compressed(out, load=quantized(load), solar=quantized(solar))


def quantized(kwh: list[list[float]]) -> np.ndarray:
    """Return hourly energies in units of `STEP`, as [home, day, hour]."""
    return np.round(np.asarray(kwh) / STEP).astype(np.uint16).reshape(len(kwh), WEEKS * 7, 24)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
