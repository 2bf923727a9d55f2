"""The command that compares estimators: which curvature form and which baseline to use."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from perfedrl import compilation
from perfedrl.cli.console import JsonFile, as_json, measuring, out, wrote
from perfedrl.experiments.config import load_config
from perfedrl.experiments.files import check_file, check_folder, write_atomically
from perfedrl.studies import estimators as study
from perfedrl.studies.estimators import tables as tables
from perfedrl.studies.paper_neural import study as paper_neural_study


class Stage(StrEnum):
    """Where along training to compare."""

    start = "start"
    middle = "middle"
    end = "end"


def estimators(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; when left out the paper's arc of goals.")] = None,
    stage: Annotated[
        list[Stage] | None, typer.Option(help="Compare here only, of start, middle and end; may be repeated.")
    ] = None,
    m: Annotated[int | None, typer.Option("--m", help="Trajectories per estimate; the config's m_h, or 10.")] = None,
    replicates: Annotated[
        int, typer.Option(help="Estimates of each kind: errors fall with their square root.")
    ] = study.REPLICATES,
    agents: Annotated[int | None, typer.Option(help="The first so many training agents; 2 or all if fewer.")] = None,
    form: Annotated[list[str] | None, typer.Option(help="Compare this curvature form only; may be repeated.")] = None,
    baseline: Annotated[list[str] | None, typer.Option(help="Use this baseline only; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="Train this seed; the config's first.")] = None,
    reference: Annotated[
        int, typer.Option(help="Trajectories that stand for the truth where states are not finitely many.")
    ] = study.REFERENCE,
    figures: Annotated[Path, typer.Option(help="Where the figure goes.")] = Path("figures"),
    json_file: JsonFile = None,
) -> None:
    """Compare estimators on a fleet: bias, variance and cost of every curvature form with every baseline.

    Trains one seed. At the start, in the middle and at the end each form estimates the curvature product that is needed
    there, many times over, and is held against the truth. Then choose `curvature` and `baseline` in the config.

    Examples: perfedrl estimators; perfedrl estimators configs/gridworld.toml --m 50 --stage end --form causal
    """
    check_folder(figures)
    if json_file:
        check_file(json_file)
    compilation.use_all_cores()
    compilation.enable_cache()
    checked = paper_neural_study.meta_config(1) if config is None else load_config(config)
    with measuring("measuring") as progress:
        found = study.measure(
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


def show(found: study.Study, figures: Path, json_file: Path | None) -> None:
    """Print the tables and what follows from them, and write the files."""
    from perfedrl.report import static
    from perfedrl.studies.estimators import figures as estimators_figures  # matplotlib is slow to import

    for stage in found.stages:
        out.print(tables.stage(found, stage))
    for line in (*tables.notes(found), *(tables.verdict(found, stage) for stage in found.stages)):
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    written = static.save(estimators_figures.comparison(found), figures)
    if json_file:
        write_atomically(json_file, as_json(tables.as_content(found)))
        written.append(json_file)
    wrote(written)
