# SPDX-License-Identifier: Apache-2.0
"""Group Tree Optimization in plain loops, one position at a time, one target forward per path.

Imports nothing from the package. Trees are dicts as naive_tree gives them.
"""

import math

import torch


def target_log_probs(target, tokens, temperature=1.0):
    """(len(tokens), V) next-token log-probabilities after every prefix of `tokens`, from one plain forward."""
    with torch.no_grad():
        logits = target(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return (logits / temperature).log_softmax(-1)


def node_probs(target, prefix, tree, eos, temperature=1.0):
    """P(node) for every node of a tree below `prefix` (whose last token is the root)."""
    probs = []
    for path in tree["paths"]:
        drafted = list(path[2:])
        p = 1.0
        rows = target_log_probs(target, prefix + drafted, temperature)
        for j, token in enumerate(drafted):
            before = prefix + drafted[:j]
            p *= 0.0 if before[-1] in eos else math.exp(rows[len(before) - 1, token])
        probs.append(p)
    return probs


def branches(tree):
    """Root-to-leaf branches as lists of columns, root excluded."""
    has_child = set(tree["parents"][1:])
    result = []
    for leaf in range(1, len(tree["tokens"])):
        if leaf in has_child:
            continue
        branch, at = [], leaf
        while at != 0:
            branch.append(at)
            at = tree["parents"][at]
        result.append(branch[::-1])
    return result


def reward(tree, probs, aggregation, eta):
    lengths = [sum(probs[c] for c in branch) for branch in branches(tree)]
    if aggregation == "lse":
        return math.log(sum(math.exp(eta * x) for x in lengths)) / eta
    if aggregation == "max":
        return max(lengths)
    if aggregation == "mean":
        return sum(lengths) / len(lengths)
    return sum(probs[1:])


def accepted_path(target, prefix, tree, eos):
    """Tokens of the branch prefix that the target's greedy choices follow."""
    at, path = 0, []
    while True:
        here = prefix + path
        if here[-1] in eos:
            return path
        token = int(target_log_probs(target, here)[-1].argmax())
        child = [c for c in range(1, len(tree["tokens"])) if tree["parents"][c] == at and tree["tokens"][c] == token]
        if not child:
            return path
        at = child[0]
        path.append(token)


def advantages(rewards, reference_rewards, delta):
    relative = [a - b for a, b in zip(rewards, reference_rewards, strict=True)]
    mean = sum(relative) / len(relative)
    std = math.sqrt(sum((r - mean) ** 2 for r in relative) / len(relative))
    return [(r - mean) / (std + delta) for r in relative]


def path_log_prob(naive, features, tokens, path):
    """log M(path | tokens), differentiable."""
    if not path:
        return torch.zeros((), dtype=features.dtype)
    logits = naive.logits(features, tokens, path[:-1])
    return sum(row.log_softmax(-1)[naive.kept.index(token)] for row, token in zip(logits, path, strict=True))


def group_loss(log_probs, reference_log_probs, lengths, advantage, epsilon):
    total = 0.0
    for lp, ref, length, a in zip(log_probs, reference_log_probs, lengths, advantage, strict=True):
        s = ((lp - ref) / max(length, 1)).exp()
        clipped = s.clamp(1 - epsilon, 1 + epsilon)
        total = total - torch.minimum(s * a, clipped * a)
    return total / len(lengths)


def token_loss(naive, target, features, tokens, supervised, kept, steps, decay, vocab):
    """Sum over roots and unrolled steps of the soft cross-entropy for one row; supervised: set of positions."""
    teacher = target_log_probs(target, tokens)
    total, roots = 0.0, 0
    for t in range(1, len(tokens) - 1):
        if t + 1 not in supervised:
            continue
        roots += 1
        text = tokens[t + 1 : t + steps]
        logits = naive.logits(features[:t], tokens[: t + 1], text)
        for k in range(steps):
            if any(t + 1 + j not in supervised for j in range(k + 1)):
                break
            row = teacher[t + k]
            if int(row.argmax()) not in kept:
                continue
            p = row[kept].softmax(-1)
            total = total - decay**k * (p * logits[k].log_softmax(-1)).sum()
    return total, roots
