# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 draft read straight from its weights: one chain at a time, recomputed from scratch, no cache, no masks.

Nothing of the package's draft code is used; only the stored tensors and sizes. Everything is differentiable.
"""

import torch


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x, positions, theta, share=1.0):
    """x: (heads, length, dim); rotary embedding with halves, as Llama's, on the first `share` of the dimensions."""
    turned, rest = x.split([int(x.shape[-1] * share), x.shape[-1] - int(x.shape[-1] * share)], -1)
    half = turned.shape[-1] // 2
    inv_freq = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (positions.double()[:, None] * inv_freq).to(x.dtype)
    cos, sin = angle.cos(), angle.sin()
    a, b = turned[..., :half], turned[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class NaiveEagle3:
    """The draft's function on one chain of tokens below one prefix.

    features: (T, k * Ht) target features at positions 0 .. T - 1; tokens: T + 1 ids x_0 .. x_T; so x_T is the root.
    """

    def __init__(self, draft, embedding):
        self.w = dict(draft.named_parameters())
        self.c = draft.config
        self.kept = (draft.d2t + torch.arange(len(draft.d2t))).tolist()
        self.embedding = embedding

    def norm(self, x, name):
        return rms_norm(x, self.w[f"{name}.weight"], self.c.rms_norm_eps)

    def linear(self, x, name):
        out = x @ self.w[f"{name}.weight"].T
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def attend(self, x, name, positions):
        """Causal attention over a whole chain; x: (length, whatever the projections read)."""
        c = self.c
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        length, rope = len(x), c.rope_parameters
        q, k, v = (self.linear(x, f"{name}.{n}_proj").view(length, -1, dim).transpose(0, 1) for n in "qkv")
        if c.qk_norm:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        share = rope.get("partial_rotary_factor", 1.0)
        q, k = (rotate(t, positions, rope["rope_theta"], share) for t in (q, k))
        k, v = (t.repeat_interleave(heads // kv_heads, 0) for t in (k, v))
        out = []
        for i in range(length):  # every position attends to those up to itself, as far back as the window reaches
            first = 0 if c.sliding_window is None else max(0, i + 1 - c.sliding_window)
            weights = (q[:, i : i + 1] @ k[:, first : i + 1].transpose(1, 2) * dim**-0.5).softmax(-1)
            out.append((weights @ v[:, first : i + 1])[:, 0])
        return self.linear(torch.stack(out).reshape(length, heads * dim), f"{name}.o_proj")

    def mlp(self, h, name):
        n = self.norm(h, f"{name}.post_attention_layernorm")
        gate, up = self.linear(n, f"{name}.mlp.gate_proj"), self.linear(n, f"{name}.mlp.up_proj")
        return h + self.linear(torch.nn.functional.silu(gate) * up, f"{name}.mlp.down_proj")

    def layer(self, embeddings, features, positions):
        """All layers over a whole chain; embeddings, features: (length, H)."""
        f = self.norm(features, "midlayer.hidden_norm")
        x = torch.cat([self.norm(embeddings, "midlayer.input_layernorm"), f], -1)
        residual = f if self.c.norm_before_residual else features
        h = self.mlp(residual + self.attend(x, "midlayer.self_attn", positions), "midlayer")
        for i in range(1, self.c.num_hidden_layers):
            n = self.norm(h, f"layers.{i}.input_layernorm")
            h = self.mlp(h + self.attend(n, f"layers.{i}.self_attn", positions), f"layers.{i}")
        return h

    def fuse(self, features):
        if self.c.norm_before_fc:
            features = self.norm(features, "input_norm")
        if self.c.fc_norm:
            parts = features.split(self.c.target_hidden_size, -1)
            features = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        return self.linear(features, "fc")

    def logits(self, features, tokens, path):
        """Draft logits after the root and after every token of `path`: list of len(path) + 1 tensors (Vd,)."""
        inputs = self.fuse(features)
        ids = list(tokens[1:])
        result = []
        for step in range(len(path) + 1):
            positions = torch.arange(len(inputs))
            out = self.layer(self.embedding[torch.tensor(ids)], inputs, positions)[-1:]
            normed = self.norm(out, "norm")
            result.append((normed @ self.w["lm_head.weight"].T)[0])
            if step < len(path):
                inputs = torch.cat([inputs, normed if self.c.norm_output else out])
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
