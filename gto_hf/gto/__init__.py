# SPDX-License-Identifier: Apache-2.0
"""Group Tree Optimization without a trainer (level 4): groups, trees of a sequence, rewards, objective."""

from .feature_losses import FEATURE_OBJECTIVES, FeatureLoss, aligned_steps, feature_token_loss, noisy
from .features import FeatureStore, row_spans
from .groups import (
    count_groups,
    padded_positions,
    roots_of,
    row_generators,
    row_seeds,
    sample_groups,
    supervised_targets,
)
from .memory import ReferenceMemory
from .objective import GroupLoss, group_advantages, gto_loss
from .objectives import TOKEN_OBJECTIVES
from .paths import accepted_paths, path_log_probs
from .reading import Readout, TargetReading, read_target
from .rewards import AGGREGATIONS, expected_acceptance, prefix_probs, tree_reward
from .scoring import TreeScores, score_trees
from .sequences import SequencePrefix, Sequences
from .step import GroupPlan, draft_forward, plan_groups
from .step_weights import STEP_WEIGHTS, decay_weights, dpace_weights
from .store import RowStore, row_key
from .token_loss import TokenLoss, supervised_steps, token_loss
from .tree_losses import TreePlan, plan_trees, tree_loss


__all__ = [
    "STEP_WEIGHTS",
    "decay_weights",
    "dpace_weights",
    "AGGREGATIONS",
    "FEATURE_OBJECTIVES",
    "FeatureLoss",
    "FeatureStore",
    "GroupLoss",
    "GroupPlan",
    "Readout",
    "ReferenceMemory",
    "RowStore",
    "SequencePrefix",
    "Sequences",
    "TOKEN_OBJECTIVES",
    "TargetReading",
    "TokenLoss",
    "TreePlan",
    "TreeScores",
    "accepted_paths",
    "aligned_steps",
    "count_groups",
    "draft_forward",
    "expected_acceptance",
    "feature_token_loss",
    "group_advantages",
    "gto_loss",
    "noisy",
    "padded_positions",
    "path_log_probs",
    "plan_groups",
    "plan_trees",
    "prefix_probs",
    "read_target",
    "roots_of",
    "row_key",
    "row_spans",
    "row_generators",
    "row_seeds",
    "sample_groups",
    "score_trees",
    "supervised_steps",
    "supervised_targets",
    "token_loss",
    "tree_loss",
    "tree_reward",
]
