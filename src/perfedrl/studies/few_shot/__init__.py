"""Few-shot personalization that helps: the recommended recipe compared with the paper's."""

from perfedrl.studies.base import Study
from perfedrl.studies.few_shot import figures
from perfedrl.studies.few_shot.study import SEEDS, few_shot, few_shot_configs

FEW_SHOT = Study(
    "fewshot", "Few-shot personalization that helps", few_shot_configs, few_shot, figures.few_shot, seeds=SEEDS
)
