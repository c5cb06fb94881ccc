# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 draft read straight from its weights: one chain at a time, recomputed from scratch, no cache, no masks.

Nothing of the package's draft code is used; only the stored tensors and sizes. Everything is differentiable.
"""

import torch


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x, positions, theta):
    """x: (heads, length, dim); rotary embedding with halves, as Llama's."""
    half = x.shape[-1] // 2
    inv_freq = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (positions.double()[:, None] * inv_freq).to(x.dtype)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class NaiveEagle3:
    """The draft's function on one chain of tokens below one prefix.

    features: (T, k * Ht) target features at positions 0 .. T - 1; tokens: T + 1 ids x_0 .. x_T; so x_T is the root.
    """

    def __init__(self, draft, embedding):
        self.w = dict(draft.named_parameters())
        self.c = draft.config
        self.kept = (draft.d2t + torch.arange(len(draft.d2t))).tolist()
        self.embedding = embedding

    def layer(self, embeddings, features, positions):
        """Causal layer over a whole chain; embeddings, features: (length, H)."""
        w, c = self.w, self.c
        e = rms_norm(embeddings, w["midlayer.input_layernorm.weight"], c.rms_norm_eps)
        f = rms_norm(features, w["midlayer.hidden_norm.weight"], c.rms_norm_eps)
        x = torch.cat([e, f], -1)
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        length = len(x)
        q, k, v = (
            (x @ w[f"midlayer.self_attn.{n}_proj.weight"].T).view(length, -1, dim).transpose(0, 1) for n in "qkv"
        )
        theta = c.rope_parameters["rope_theta"]
        q, k = rotate(q, positions, theta), rotate(k, positions, theta)
        k, v = (t.repeat_interleave(heads // kv_heads, 0) for t in (k, v))
        out = []
        for i in range(length):  # every position attends to those up to itself
            weights = (q[:, i : i + 1] @ k[:, : i + 1].transpose(1, 2) * dim**-0.5).softmax(-1)
            out.append((weights @ v[:, : i + 1])[:, 0])
        attended = torch.stack(out).reshape(length, heads * dim) @ w["midlayer.self_attn.o_proj.weight"].T
        h = features + attended
        n = rms_norm(h, w["midlayer.post_attention_layernorm.weight"], c.rms_norm_eps)
        gate, up = n @ w["midlayer.mlp.gate_proj.weight"].T, n @ w["midlayer.mlp.up_proj.weight"].T
        return h + (torch.nn.functional.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T

    def logits(self, features, tokens, path):
        """Draft logits after the root and after every token of `path`: list of len(path) + 1 tensors (Vd,)."""
        w = self.w
        inputs = features @ w["fc.weight"].T
        ids = list(tokens[1:])
        result = []
        for step in range(len(path) + 1):
            positions = torch.arange(len(inputs))
            out = self.layer(self.embedding[torch.tensor(ids)], inputs, positions)
            result.append(rms_norm(out[-1], w["norm.weight"], self.c.rms_norm_eps) @ w["lm_head.weight"].T)
            if step < len(path):
                inputs = torch.cat([inputs, out[-1:]])
                ids.append(path[step])
        return result


class PathModel:
    """Adapter for naive_tree: the draft after a fixed prefix as a function of the path."""

    def __init__(self, naive, features, tokens):
        self.naive, self.features, self.tokens = naive, features, tokens

    def children(self, path, k):
        """path: (context, root, ...); the k best (log-probability, target token) pairs."""
        row = self.naive.logits(self.features, self.tokens, path[2:])[-1].log_softmax(-1).tolist()
        best = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
        return [(row[i], self.naive.kept[i]) for i in best]
