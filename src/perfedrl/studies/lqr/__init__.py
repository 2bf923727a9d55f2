"""Linear-quadratic regulators: meta-learned gains for unseen systems, computed exactly."""

from perfedrl.studies.base import Study, no_configs
from perfedrl.studies.lqr import figures, study

LQR = Study(
    "lqr",
    "Linear-quadratic regulators, exactly",
    no_configs,
    study.claims,
    figures.figures,
    measure=lambda _runs, progress: study.measure(progress),
)
