# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 draft read straight from its weights: one chain at a time, recomputed from scratch, no cache, no masks.

Nothing of the package's draft code is used; only the stored tensors and sizes. Everything is differentiable.
"""

import math

import torch


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def frequencies(dim, theta):
    """Inverse frequencies (dim / 2,) of the default rotary embedding, and its factor on cosine and sine."""
    return theta ** (-torch.arange(dim // 2, dtype=torch.float64) / (dim // 2)), 1.0


def yarn(dim, theta, factor, length):
    """Those of yarn: fast dimensions as they are, slow ones `factor` times slower, a ramp between; `length` trained on."""
    inv_freq, _ = frequencies(dim, theta)

    def dimension(turns):
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), 0.1 * math.log(factor) + 1


def rotate(x, positions, inv_freq, scale=1.0):
    """x: (heads, length, dim); rotary embedding with halves, as Llama's, on the first 2 * len(inv_freq) dimensions."""
    half = len(inv_freq)
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    angle = (positions.double()[:, None] * inv_freq).to(x.dtype)
    cos, sin = angle.cos() * scale, angle.sin() * scale
    a, b = turned[..., :half], turned[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class NaiveEagle3:
    """The draft's function on one chain of tokens below one prefix.

    features: (T, k * Ht) target features at positions 0 .. T - 1; tokens: T + 1 ids x_0 .. x_T; so x_T is the root.
    """

    def __init__(self, draft, embedding):
        self._set(dict(draft.named_parameters()), draft.config, draft.d2t, embedding)

    @classmethod
    def of_tensors(cls, weights, config, d2t, embedding):
        """From tensors with SafeAILab's names and an object with a draft config's fields."""
        self = cls.__new__(cls)
        self._set(weights, config, d2t, embedding)
        return self

    def _set(self, weights, config, d2t, embedding):
        self.w, self.c, self.embedding = weights, config, embedding
        self.kept = (d2t + torch.arange(len(d2t))).tolist()
        rope = config.rope_parameters
        dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        if rope["rope_type"] == "yarn":
            length = rope["original_max_position_embeddings"]
            self.rotary = yarn(dim, rope["rope_theta"], rope["factor"], length)
        else:
            self.rotary = frequencies(dim, rope["rope_theta"])

    def norm(self, x, name):
        return rms_norm(x, self.w[f"{name}.weight"], self.c.rms_norm_eps)

    def linear(self, x, name):
        out = x @ self.w[f"{name}.weight"].T
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def attend(self, x, name, positions):
        """Causal attention over a whole chain; x: (length, whatever the projections read)."""
        c = self.c
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        length = len(x)
        q, k, v = (self.linear(x, f"{name}.{n}_proj").view(length, -1, dim).transpose(0, 1) for n in "qkv")
        if c.qk_norm:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        q, k = (rotate(t, positions, *self.rotary) for t in (q, k))
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
