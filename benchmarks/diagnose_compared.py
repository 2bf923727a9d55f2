"""Diagnose the fleets of the committed comparisons, save what is recommended, and print what following it would cost.

Fleets with exact returns take the step sizes of the shipped config of their kind. Parts of diagnoses are saved in
`diagnoses/`, so that an interrupted script goes on. `--saved` prints the table from the saved recommendations.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from perfedrl import compilation
from perfedrl.experiments.config import load_config
from perfedrl.experiments.files import write_atomically
from perfedrl.studies.compare import ComparisonPlan, load_plans
from perfedrl.studies.diagnosis import diagnose_config
from perfedrl.studies.diagnosis.agreement import FILE, METHOD_OF, regrets
from perfedrl.studies.diagnosis.tables import content

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "compare"
SHIPPED = {"gridworld": "gridworld.toml", "random-mdps": "random_mdps.toml"}
"""Configs whose step sizes fleets with exact returns take, by the kind of fleet."""
SAVED = ("recommendation", "needed", "worth_of_learning", "gain", "step_gains", "tuning_gains")


def recommended(plan: ComparisonPlan, diagnoses: Path) -> dict:
    """Diagnose the fleet of a plan, and return what matters of the result."""
    steps = {name: float(np.sqrt(low * high)) for name, (low, high) in plan.search.items()}
    if shipped := SHIPPED.get(plan.fleet["env"]):
        algorithm = load_config(ROOT / "configs" / shipped).algorithm
        steps = {name: algorithm[name] for name in steps}
    found = content(diagnose_config(plan.config("fine-tuned", steps), diagnoses))
    return {key: found[key] for key in SAVED}


def main() -> None:
    """Diagnose, save and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saved", action="store_true", help="diagnose nothing")
    parser.add_argument("--diagnoses", type=Path, default=Path("diagnoses"), help="folder for parts of diagnoses")
    options = parser.parse_args()
    plans = [plan for path in sorted((ROOT / "configs" / "compare").glob("*.toml")) for plan in load_plans(path)]
    if not options.saved:
        compilation.use_all_cores()
        compilation.enable_cache()
        found = {plan.name: recommended(plan, options.diagnoses) for plan in plans}
        write_atomically(RESULTS / FILE, (json.dumps(found, indent=1) + "\n").encode())
    unseen, training = (regrets(plans, RESULTS, training=x) for x in (False, True))
    table = Table("fleet", "followed", "best, unseen", "lost", "right", "best, training", "lost", "right")
    for name, one in unseen.items():
        row = [name, one.method]
        for regret in (one, training[name]):
            lost = "{:.1%} ({:.1%} .. {:.1%})".format(*regret.lost)
            row += [regret.best, lost, "yes" if regret.right else "no"]
        table.add_row(*row)
    Console(width=160).print(table)
    strict = regrets(plans, RESULTS, among=METHOD_OF.values())
    print(f"right: {sum(x.right for x in unseen.values())} of {len(unseen)} for unseen agents,")
    print(f"{sum(x.right for x in training.values())} for training agents;")
    print(f"the best of the four mechanisms: {sum(x.best == x.method for x in strict.values())}")


if __name__ == "__main__":
    main()
