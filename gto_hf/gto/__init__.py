# SPDX-License-Identifier: Apache-2.0
"""Group Tree Optimization without a trainer (level 4): groups, trees of a sequence, rewards, objective."""

from .groups import count_groups, padded_positions, roots_of, row_generators, sample_groups, supervised_targets
from .objective import GroupLoss, group_advantages, gto_loss
from .paths import accepted_paths, path_log_probs
from .reading import TargetReading, read_target
from .rewards import AGGREGATIONS, expected_acceptance, prefix_probs, tree_reward
from .scoring import TreeScores, score_trees
from .sequences import SequencePrefix, Sequences
from .step import GroupPlan, draft_forward, plan_groups
from .token_loss import Teacher, TokenLoss, make_teacher, supervised_steps, token_loss


__all__ = [
    "AGGREGATIONS",
    "GroupLoss",
    "GroupPlan",
    "SequencePrefix",
    "Sequences",
    "Teacher",
    "TargetReading",
    "TokenLoss",
    "TreeScores",
    "accepted_paths",
    "count_groups",
    "draft_forward",
    "expected_acceptance",
    "group_advantages",
    "gto_loss",
    "make_teacher",
    "padded_positions",
    "path_log_probs",
    "plan_groups",
    "prefix_probs",
    "read_target",
    "roots_of",
    "row_generators",
    "sample_groups",
    "score_trees",
    "supervised_steps",
    "supervised_targets",
    "token_loss",
    "tree_reward",
]
