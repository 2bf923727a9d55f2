"""Makes the patients' table and the trajectories of `tests/envs/test_glucose_model.py` from the package simglucose.

Run by hand, with the folder of the unpacked wheel:

    pip download --no-deps simglucose==0.2.11 && unzip simglucose-0.2.11-py3-none-any.whl -d simglucose-wheel
    python tests/support/simglucose_oracle.py simglucose-wheel

Of the package only the class of the patient is imported; two modules that it needs for reading tables are replaced by
empty ones, since the package's dependencies no longer install together.
"""

import csv
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "src/perfedrl/envs/glucose/patients.csv"
TRAJECTORIES = ROOT / "tests/envs/glucose_trajectories.npz"

COLUMNS = (
    *("Name", "BW", "u2ss", "CR", "CF"),
    *("kabs", "kmax", "kmin", "b", "d", "f", "Vg", "k1", "k2", "Fsnc", "Vm0", "Vmx", "Km0", "p2u", "ke1", "ke2"),
    *("kp1", "kp2", "kp3", "ki", "Ib", "Vi", "m1", "m2", "m4", "m30", "ka1", "ka2", "kd", "ksc"),
    *("Gpb", "Gtb", "Ipb", "Ilb", "isc1ss", "isc2ss"),
)

MINUTES = 1440
WHO = ("adult#001", "adult#006", "adolescent#005", "adolescent#006", "child#005", "child#008")
"""Three pairs; the fastest rates of the table are those of adolescent#005 and adolescent#006."""


def read(folder: Path) -> list[dict[str, str]]:
    """Join the two tables by name."""
    params = folder / "simglucose/params"
    with (params / "vpatient_params.csv").open() as one, (params / "Quest.csv").open() as other:
        clinical = {row["Name"]: row for row in csv.DictReader(other)}
        return [{**row, **clinical[row["Name"]]} for row in csv.DictReader(one)]


def write_table(rows: list[dict[str, str]]) -> None:
    """Write the columns that the model needs."""
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def oracle(folder: Path) -> Any:
    """Import the package's patient without its dependencies."""
    resources: Any = types.ModuleType("pkg_resources")
    resources.resource_filename = lambda package, name: str(folder / package / name)
    sys.modules.update({"pkg_resources": resources, "pandas": types.ModuleType("pandas")})
    for name in ("simglucose", "simglucose.patient"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    from simglucose.patient import t1dpatient

    return t1dpatient


def day(seed: int, weight: float, basal: float) -> tuple[np.ndarray, np.ndarray]:
    """Draw the meals (g) and the insulin (U/min) of every minute of a day: meals with boluses, pauses and excess."""
    rng = np.random.default_rng(seed)
    meals = np.zeros(MINUTES)
    insulin = basal * np.repeat(rng.choice([0.0, 0.5, 1.0, 2.0], MINUTES // 30), 30)
    for at in (120, 400, 520, 800, 1100):
        grams = float(rng.uniform(0.1, 1.2) * weight)
        meals[at] = grams
        insulin[at : at + 5] += grams / 15 / 5
    return meals, insulin


def main(folder: Path) -> None:
    """Write both files."""
    rows = read(folder)
    write_table(rows)
    module = oracle(folder)
    found: dict[str, Any] = {"names": np.array(WHO)}
    for i, name in enumerate(WHO):
        row = next(row for row in rows if row["Name"] == name)
        params = types.SimpleNamespace(**{key: value if key == "Name" else float(value) for key, value in row.items()})
        start = np.array([float(row[f"x0_{k:2}"]) for k in range(1, 14)])
        person = module.T1DPatient(params, init_state=start)
        meals, insulin = day(i, params.BW, params.u2ss * params.BW / 6000)
        states = []
        for grams, rate in zip(meals, insulin, strict=True):
            person.step(module.Action(CHO=grams, insulin=rate))
            states.append(np.array(person.state))
        found |= {f"meals{i}": meals, f"insulin{i}": insulin, f"states{i}": np.array(states)[14::15]}
    np.savez_compressed(TRAJECTORIES, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
