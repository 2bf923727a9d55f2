"""The paper's theory: bounds and rates against exact quantities, and the analysis of a config."""

from perfedrl.studies.base import Study, no_configs
from perfedrl.studies.theory import figures, study

THEORY = Study(
    "theory",
    "Bounds and rates against exact quantities",
    no_configs,
    study.claims,
    figures.figures,
    measure=lambda _runs, progress: study.measure_all(progress),
)
