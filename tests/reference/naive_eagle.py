# SPDX-License-Identifier: Apache-2.0
"""EAGLE-1/2, its variant with norms, and GRIFFIN read straight from tensors: one chain at a time, no cache, no masks.

Nothing of the package is used; only tensors under the names of the released checkpoints. Everything is differentiable.
"""

import torch
import torch.nn.functional as F

from .naive_eagle3 import frequencies, rms_norm, rotate


class NaiveEagle:
    """The function of one draft.

    w: tensors by name; heads: query heads; embedding: (V, H); logits_of: hidden states (n, H) to logits (n, Vd).
    """

    def __init__(self, w, embedding, logits_of, *, heads, theta=10000.0, eps=1e-6):
        self.w, self.embedding, self.logits_of = w, embedding, logits_of
        self.heads, self.theta, self.eps = heads, theta, eps
        self.width = embedding.shape[1]

    def norm(self, name, x):
        """x normalised by a weight that some files do not have."""
        return rms_norm(x, self.w[name], self.eps) if name in self.w else x

    def joined(self, embeddings, features):
        """What the layer reads, (n, H)."""
        w = self.w
        if "fc.fc.weight" not in w:
            both = torch.cat([self.norm("embedding_layernorm.weight", embeddings), features], -1)
            return F.linear(both, w["fc.weight"], w.get("fc.bias"))
        x = F.linear(torch.cat([embeddings, features], -1), w["fc.fc.weight"], w["fc.fc.bias"])
        y = self.norm("fc.post_attention_layernorm.weight", x)
        ln = "fc.mlp.input_layernorm.weight"
        up = torch.cat([self.norm(ln, y), self.norm(ln, embeddings)], -1) @ w["fc.mlp.up_proj.weight"].T
        return x + F.silu(up) @ w["fc.mlp.down_proj.weight"].T

    def project(self, name, x, positions=None):
        """Heads (heads, n, d) of a projection, rotated if it has positions."""
        w = self.w
        name = f"layers.0.self_attn.{name}_proj"
        out = F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))
        dim = w["layers.0.self_attn.q_proj.weight"].shape[0] // self.heads
        out = out.view(len(x), -1, dim).transpose(0, 1)
        return out if positions is None else rotate(out, positions, *frequencies(out.shape[-1], self.theta))

    def keys_values(self, x, positions):
        """Keys and values (heads, n, d) of inputs (n, H), as many as there are query heads."""
        x = self.norm("layers.0.input_layernorm.weight", x)
        both = self.project("k", x, positions), self.project("v", x)
        return tuple(y.repeat_interleave(self.heads // len(y), 0) for y in both)

    def query(self, x, positions):
        return self.project("q", self.norm("layers.0.input_layernorm.weight", x), positions)

    def finish(self, x, attended):
        """Outputs (n, H), or (n, 2H) of GRIFFIN, from the layer's input and what attention found (heads, n, d)."""
        w = self.w
        a = x + attended.transpose(0, 1).flatten(1) @ w["layers.0.self_attn.o_proj.weight"].T
        n = self.norm("layers.0.post_attention_layernorm.weight", a)
        m = F.silu(n @ w["layers.0.mlp.gate_proj.weight"].T) * (n @ w["layers.0.mlp.up_proj.weight"].T)
        m = m @ w["layers.0.mlp.down_proj.weight"].T
        return m + (a if m.shape[1] == a.shape[1] else torch.cat([a, a], -1))

    def layer(self, x, positions):
        """Causal layer over a whole chain of inputs (n, H)."""
        q, (k, v) = self.query(x, positions), self.keys_values(x, positions)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~torch.ones(len(x), len(x), dtype=torch.bool).tril(), -torch.inf)
        return self.finish(x, scores.softmax(-1) @ v)

    def predicted(self, outputs):
        """What the head reads."""
        return self.norm("pre_lm_head_layernorm.weight", outputs[..., : self.width])

    def regressed(self, outputs):
        """The next feature."""
        return outputs[..., -self.width :]

    def outputs(self, features, tokens, path, *, detach=False):
        """Outputs after the root and after each token of a path: a list of len(path) + 1 tensors (H,) or (2H,).

        features: (T, H) target features at positions 0 .. T - 1; tokens: T + 1 ids, of which the last is the root.
        """
        inputs, ids, result = features, list(tokens[1:]), []
        for step in range(len(path) + 1):
            x = self.joined(self.embedding[torch.tensor(ids)], inputs)
            result.append(self.layer(x, torch.arange(len(ids)))[-1])
            if step < len(path):
                fed = self.regressed(result[-1])
                inputs = torch.cat([inputs, (fed.detach() if detach else fed)[None]])
                ids.append(path[step])
        return result

    def logits(self, features, tokens, path):
        """Logits after the root and after each token of a path."""
        return [self.logits_of(self.predicted(out)[None])[0] for out in self.outputs(features, tokens, path)]

    def passes(self, features, ids, count):
        """HASS as it is written down: pass after pass over a whole text, each fed with the one before it, shifted.

        features: (T, H); ids: T + 1 tokens. Query t of pass j sees the keys of pass j at t, of pass j - 1 at t - 1, and so
        on, and those of the first pass at all positions before. Returns count tensors (T, W); rows t < j mean nothing.
        """
        positions = torch.arange(len(features))
        embeddings = self.embedding[torch.tensor(ids[1:])]
        made, fed = [], [features]
        for j in range(count):
            inputs = [self.joined(embeddings, f) for f in fed]
            kv = [self.keys_values(x, positions) for x in inputs]
            q = self.query(inputs[j], positions)
            attended = []
            for t in range(len(features)):
                at = [(max(j - (t - s), 0), s) for s in range(t + 1)]  # (pass, position) of every key that is seen
                k, v = (torch.stack([kv[p][i][:, s] for p, s in at], 1) for i in (0, 1))
                weights = (q[:, t : t + 1] @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
                attended.append(weights @ v)
            made.append(self.finish(inputs[j], torch.cat(attended, 1)))
            shifted = torch.cat([features[:1], self.regressed(made[-1])[:-1]])
            fed.append(shifted.detach())
        return made
