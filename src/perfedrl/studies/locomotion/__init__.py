"""Bodies of MuJoCo, trained by clipped steps: half-cheetahs by direction and by velocity."""

from perfedrl.studies.base import MUJOCO, Study
from perfedrl.studies.locomotion import figures, study

LOCOMOTION = Study(
    study.NAME,
    "Half-cheetahs by direction and by velocity",
    study.configs,
    study.claims,
    figures.locomotion,
    seeds=study.SEEDS,
    extra=MUJOCO,
)
