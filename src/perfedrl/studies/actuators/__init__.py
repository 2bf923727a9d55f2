"""Cart-poles and pendulums that differ in hidden actuators: one policy for all fails, one step serves each."""

from perfedrl.studies.actuators import figures, study
from perfedrl.studies.base import Study

ACTUATORS = Study(
    study.NAME,
    "Bodies with hidden actuators of either sign",
    study.configs,
    study.claims,
    figures.actuators,
    seeds=study.SEEDS,
)
