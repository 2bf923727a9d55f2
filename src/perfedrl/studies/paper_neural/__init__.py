"""The paper's neural experiments: curvature bottleneck (E4), few-shot personalization (E5), rollouts (E7)."""

from perfedrl.studies.base import Study
from perfedrl.studies.paper_neural import figures
from perfedrl.studies.paper_neural.study import (
    curvature_bottleneck,
    curvature_configs,
    few_shot,
    few_shot_configs,
    rollout_configs,
    rollouts,
)

E4 = Study(
    "e4",
    "The curvature bottleneck (neural)",
    curvature_configs,
    curvature_bottleneck,
    figures.curvature_bottleneck,
)
E5 = Study("e5", "Few-shot personalization to unseen agents (neural)", few_shot_configs, few_shot, figures.few_shot)
E7 = Study("e7", "Rollouts on an unseen goal (neural)", rollout_configs, rollouts, figures.rollouts)
