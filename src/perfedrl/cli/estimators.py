"""The command `estimators`, which compares curvature forms and baselines."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from perfedrl import compilation
from perfedrl.cli.console import JsonFile, Trust, as_json, out, print_written, status_line
from perfedrl.experiments.config import load_config
from perfedrl.experiments.files import check_file, check_folder, write_atomically
from perfedrl.studies.estimators import REFERENCE, REPLICATES, EstimatorComparison, compare_estimators, tables
from perfedrl.studies.estimators.figures import comparison
from perfedrl.studies.paper_neural.study import meta_config


class Stage(StrEnum):
    """The stages of training at which estimators are compared."""

    start = "start"
    middle = "middle"
    end = "end"


def estimators(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; by default the paper's arc of goals.")] = None,
    stage: Annotated[list[Stage] | None, typer.Option(help="Compare at this stage only; may be repeated.")] = None,
    m: Annotated[int | None, typer.Option("--m", help="Trajectories per estimate; by default m_h, or 10.")] = None,
    replicates: Annotated[
        int, typer.Option(help="Estimates per estimator; standard errors fall with their square root.")
    ] = REPLICATES,
    agents: Annotated[int | None, typer.Option(help="Number of training agents, from the first; by default 2.")] = None,
    form: Annotated[list[str] | None, typer.Option(help="Compare this curvature form only; may be repeated.")] = None,
    baseline: Annotated[list[str] | None, typer.Option(help="Use this baseline only; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed to train; by default the config's first.")] = None,
    reference: Annotated[
        int, typer.Option(help="Trajectories from which the truth is estimated for fleets that are not tabular.")
    ] = REFERENCE,
    figures: Annotated[Path, typer.Option(help="Folder for the figure, which is named after the config.")] = Path(
        "figures"
    ),
    trust: Trust = False,
    json_file: JsonFile = None,
) -> None:
    """Compare estimators on a fleet: bias, variance and cost of every curvature form with every baseline.

    One seed is trained. At its start, middle and end each form estimates the curvature product many times, and the
    estimates are compared with the truth. The result helps to choose `curvature` and `baseline` in the config.

    Examples: perfedrl estimators; perfedrl estimators configs/gridworld.toml --m 50 --stage end --form causal
    """
    check_folder(figures)
    if json_file:
        check_file(json_file)
    compilation.use_all_cores()
    compilation.enable_cache()
    checked = meta_config(1) if config is None else load_config(config, trust=trust)
    with status_line("measuring") as progress:
        found = compare_estimators(
            checked,
            [x.value for x in stage or Stage],
            m=m,
            replicates=replicates,
            agents=agents,
            seed=seed,
            forms=form or (),
            baselines=baseline or (),
            reference=reference,
            progress=progress,
        )
    show(found, figures, json_file)


def show(found: EstimatorComparison, figures: Path, json_file: Path | None) -> None:
    """Print the tables and the recommended forms, and write the files."""
    from perfedrl.report import static  # imports matplotlib, which is slow to import

    for stage in found.stages:
        out.print(tables.stage(found, stage))
    for line in (*tables.notes(found), *(tables.recommendation(found, stage) for stage in found.stages)):
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    written = static.save(comparison(found), figures)
    if json_file:
        write_atomically(json_file, as_json(tables.as_content(found)))
        written.append(json_file)
    print_written(written)
