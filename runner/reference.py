"""The reference decoder: DeepSeek-V2 in plain torch, from an artifact and nothing else.

All ranks run in one process, one after the other, and a collective is a sum in rank order. It is
written to be right rather than fast: weights are dequantised as they are used, activations are
fp32 between phases as in the kernel, and every sum runs in float64, so that neither the number of
ranks nor the order of a library's sums shows in the result. The latent cache is bf16, as in the
kernel, or fp32.

A router is discontinuous: where two experts' logits lie closer together than rounding moves them,
two decoders that are both right choose differently, and then compute different functions. So the
reference can be told which experts to take; `choice_slack` says how far that is from its own.

Suffixes name shapes: H hidden, C kv_lora, R rope, N nope, V v_head_dim or vocabulary, T positions,
h the heads of a rank, u the units of a rank that are at work.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dsv2mk.artifacts.artifact import Artifact
from dsv2mk.artifacts.tensors import as_torch
from dsv2mk.manifests.errors import ArtifactError, UsageError
from dsv2mk.manifests.geometry import LATENT_NORM_EPS, Geometry
from dsv2mk.manifests.scheme import BLOCK

CACHE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

#: Weight elements that are widened to float64 at a time.
_PIECE = 1 << 24


class ReferenceDecoder:
    """Decodes one sequence, position by position."""

    def __init__(
        self,
        artifact: Artifact,
        cache_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        self.geometry = artifact.manifest.geometry
        self._layouts = artifact.layouts
        self._topology = artifact.manifest.topology
        self._ranks = [
            {
                name: as_torch(artifact.map_tensor(layout.rank, name), spec).to(device)
                for name, spec in layout.tensors.items()
            }
            for layout in artifact.layouts
        ]
        self._angles = torch.tensor(
            self.geometry.inverse_frequencies(), dtype=torch.float64, device=device
        )
        self._cache: list[list[Tensor]] = [[] for _ in range(self.geometry.num_hidden_layers)]
        self._cache_dtype = cache_dtype
        #: (layer, phase) -> what the phase leaves, of the last step; None: not wanted. Of `o` and
        #: `down` the partial sums of all ranks [R, H], of heads rank 0's, of units every one's.
        self.trace: dict[tuple[int, str], Tensor] | None = None
        #: (layer, own experts, given ones, choice_slack) where the last step was given another set.
        self.followed: list[tuple[int, list[int], list[int], float]] = []
        self._choices: Mapping[int, Sequence[int]] = {}

    def _note(self, layer: int, phase: str, value: Tensor) -> None:
        if self.trace is not None and (layer, phase) not in self.trace:
            self.trace[layer, phase] = value.float()

    @property
    def position(self) -> int:
        """Position that the next token will take."""
        return len(self._cache[0])

    def step(self, token: int, choices: Mapping[int, Sequence[int]] | None = None) -> Tensor:
        """Feed one token; logits [V] fp32 of the next.

        choices: layer -> experts to take there, in this order, instead of the router's own; their
        weights are its own. What is no set of experts of the right size is not taken.
        Raises UsageError for a token outside of the vocabulary or past the longest context.
        """
        g = self.geometry
        if not 0 <= token < g.vocab_size:
            raise UsageError("token id", expected=f"0 to {g.vocab_size - 1}", found=token)
        if self.position >= g.max_position_embeddings:
            raise UsageError("context is full", expected=f"at most {g.max_position_embeddings}")
        turn = self.position * self._angles
        if self.trace is not None:
            self.trace.clear()
        self.followed, self._choices = [], choices or {}
        h_H = self._ranks[0]["embed"][token].float()
        for layer in range(g.num_hidden_layers):
            h_H = h_H + self._attention(layer, h_H, turn)
            h_H = h_H + self._feed_forward(layer, h_H)
        x_H = _rms_norm(h_H, self._ranks[0]["final_norm"], g.rms_norm_eps)
        logits = []
        for rank, weights in enumerate(self._ranks):
            start, end = self._topology.vocab_range(g, rank)  # the rows past it are padding
            logits.append(_matvec(weights["lm_head"][: end - start], x_H))
        return torch.cat(logits).float()

    # ---- attention ----

    def _attention(self, layer: int, h_H: Tensor, turn: Tensor) -> Tensor:
        """MLA over the compressed cache, with W_UK and W_UV absorbed; [H]."""
        g, shared = self.geometry, self._ranks[0]
        x_H = _rms_norm(h_H, shared["attn_norm"][layer], g.rms_norm_eps)
        a = _matvec(shared["qkv_a"][layer], x_H).float()
        self._note(layer, "qkv", a)
        q_in, kv_C, k_R = torch.split(a, [g.q_lora_rank or 0, g.kv_lora_rank, g.qk_rope_head_dim])
        if g.q_lora_rank is None:
            q_in = x_H
        else:
            q_in = _rms_norm(q_in, shared["q_a_norm"][layer], LATENT_NORM_EPS)
        kv_C = _rms_norm(kv_C, shared["kv_a_norm"][layer], LATENT_NORM_EPS)
        k_R = self._rotate(k_R, turn)
        self._cache[layer].append(torch.cat([kv_C, k_R]).to(self._cache_dtype))
        cache = torch.stack(self._cache[layer]).double()
        cache_TC, cache_TR = torch.split(cache, [g.kv_lora_rank, g.qk_rope_head_dim], dim=1)

        partials = []
        for weights in self._ranks:
            q_b = weights["q_b"][layer]
            q_h = _matvec(q_b.flatten(0, 1), q_in).float().view(len(q_b), -1)
            self._note(layer, "q", q_h)
            q_hN, q_hR = torch.split(q_h, [g.qk_nope_head_dim, g.qk_rope_head_dim], dim=1)
            q_hR = self._rotate(q_hR, turn)
            q_hC = (weights["w_uk"][layer].double() @ q_hN.double()[:, :, None]).squeeze(2).float()
            self._note(layer, "q_lat", q_hC)
            scores_hT = q_hC.double() @ cache_TC.T + q_hR.double() @ cache_TR.T
            p_hT = (scores_hT * g.softmax_scale).softmax(dim=1).float()
            out_hC = (p_hT.double() @ cache_TC).float()
            self._note(layer, "latent", out_hC)
            out_hV = (weights["w_uv"][layer].double() @ out_hC.double()[:, :, None]).float()
            partials.append(_matvec(weights["o"][layer], out_hV.flatten()))
            self._note(layer, "value", out_hV.squeeze(2))
        self._note(layer, "o", torch.stack(partials))
        return _all_reduce(partials)

    def _rotate(self, x: Tensor, turn: Tensor) -> Tensor:
        """Turn each adjacent pair of the last axis by its angle (RoPE, YaRN's magnitude on it)."""
        pairs = torch.view_as_complex(x.double().view(*x.shape[:-1], -1, 2))
        magnitude = torch.full_like(turn, self.geometry.rope_magnitude)
        return torch.view_as_real(pairs * torch.polar(magnitude, turn)).flatten(-2).float()

    # ---- feed forward ----

    def _feed_forward(self, layer: int, h_H: Tensor) -> Tensor:
        """Sum over the units that are at work: all of a dense FFN, shared and routed ones; [H]."""
        g, shared = self.geometry, self._ranks[0]
        x_H = _rms_norm(h_H, shared["ffn_norm"][layer], g.rms_norm_eps)
        if g.is_dense(layer):
            active = dict.fromkeys(range(g.layer_units(layer)), 1.0)
        else:
            router = shared["router"][layer - g.first_k_dense_replace]
            active = {}
            scores = _matvec(router, x_H).float()
            self._note(layer, "route", scores)
            chosen = self._choose(layer, scores)
            self._note(layer, "chosen", torch.tensor(chosen, device=scores.device).T)
            for expert, weight in chosen:
                first = expert * g.expert_units
                active |= dict.fromkeys(range(first, first + g.expert_units), weight)
            active |= dict.fromkeys(range(g.routed_units, g.layer_units(layer)), 1.0)
        partials = []
        for rank, weights in enumerate(self._ranks):
            own = [unit for unit in sorted(active) if self._topology.unit_rank(unit) == rank]
            first = self._layouts[rank].unit_offsets[layer]
            y_H = torch.zeros(g.hidden_size, dtype=torch.float64, device=x_H.device)
            for unit in own:
                slot = first + self._topology.unit_slot(unit)
                act, y = self._unit(weights, slot, x_H, active[unit])
                self._note(layer, f"act {unit}", act)
                y_H += y
            partials.append(y_H)
        self._note(layer, "down", torch.stack(partials))
        return _all_reduce(partials)

    def _unit(
        self, weights: dict[str, Tensor], slot: int, x_H: Tensor, weight: float
    ) -> tuple[Tensor, Tensor]:
        """act = silu(gate @ x) * (up @ x) * weight [128], down @ act [H] float64, of one unit."""
        hidden = self.geometry.hidden_size
        scale = weights["ffn_gate_up_scale"][slot].repeat_interleave(BLOCK, 1)[:, :hidden]
        gate_up = weights["ffn_gate_up"][slot].float() * scale  # [128, 2, H]
        gate, up = (gate_up.double() @ x_H.double()).float().unbind(1)
        act = torch.nn.functional.silu(gate) * up * weight
        scale = weights["ffn_down_scale"][slot].repeat_interleave(BLOCK)[:hidden]
        down = weights["ffn_down"][slot].float() * scale[:, None]  # [H, 128]
        return act, down.double() @ act.double()

    def _choose(self, layer: int, logits: Tensor) -> list[tuple[int, float]]:
        """(expert, weight) of the experts at work: the router's own, or those that are given."""
        g, own = self.geometry, route(self.geometry, logits)
        if layer not in self._choices:
            return own
        given, expected = list(self._choices[layer]), [expert for expert, _ in own]
        if sorted(given) != sorted(expected):
            slack = choice_slack(g, logits, given)
            self.followed.append((layer, expected, given, slack))
            if not _are_experts(g, given):
                return own
        weights, scores = dict(own), logits.softmax(0)
        return [
            (expert, weights.get(expert, float(scores[expert]) * g.routed_scaling_factor))
            for expert in given
        ]


# ---- routing ----


def route(g: Geometry, logits: Tensor) -> list[tuple[int, float]]:
    """(expert, weight) of the chosen experts; of equal scores the lower index wins.

    Softmax over all experts; only the groups with the highest maxima may be chosen from.
    """
    scores = logits.softmax(0)
    by_group = scores.view(g.n_group, g.experts_per_group)
    groups = by_group.amax(1).sort(descending=True, stable=True).indices[: g.topk_group]
    allowed = torch.zeros(g.n_group, 1, dtype=torch.bool, device=logits.device)
    allowed[groups] = True
    ordered = by_group.where(allowed, 0.0).flatten().sort(descending=True, stable=True)
    return [
        (int(ordered.indices[rank]), float(ordered.values[rank]) * g.routed_scaling_factor)
        for rank in range(g.num_experts_per_tok)
    ]


def choice_slack(g: Geometry, logits: Tensor, experts: Sequence[int]) -> float:
    """By how much each logit has to change at least for the router to choose these experts.

    Over the largest magnitude of the logits. 0 for its own choice, and where only ties stand
    against `experts`; infinite if no change does it: too many groups, or no set of experts.
    """
    # If any change of at most d makes the router choose the set E, then so does this one: all of E
    # up by d, all others down by d. For E is chosen if
    # - each group with a member of E is among the topk_group with the highest maxima. Its maximum
    #   is a member (all others in it have to be below E's least), so up, and the others' are down;
    # - every expert outside of E but in a chosen group is below E's least: that goes up and they
    #   down. A chosen group without a member of E may become another one, but only one that lay
    #   below the first, and so below E's least too.
    # So two logits that have to change places must be at most 2 d apart, and nothing else counts.
    # If E leaves a group to choose, the best of the other groups is chosen and has to be below E's
    # least; if not, the other groups only have to be below the least of E's group maxima.
    if not _are_experts(g, experts) or not logits.isfinite().all():
        return math.inf
    values = logits.tolist()
    best: dict[int, float] = {}  # group -> its highest member of E
    for expert in experts:
        group = expert // g.experts_per_group
        best[group] = max(best.get(group, -math.inf), values[expert])
    if len(best) > g.topk_group:
        return math.inf
    least = min(values[expert] for expert in experts)
    bar = least if len(best) < g.topk_group else min(best.values())
    apart = max(
        (
            value - (least if expert // g.experts_per_group in best else bar)
            for expert, value in enumerate(values)
            if expert not in experts
        ),
        default=0.0,
    )
    return max(apart, 0.0) / 2 / (max(map(abs, values)) or 1.0)


def _are_experts(g: Geometry, experts: Sequence[int]) -> bool:
    """Whether they are as many different experts as a token takes."""
    bounded = all(0 <= expert < g.n_routed_experts for expert in experts)
    return bounded and len(experts) == len(set(experts)) == g.num_experts_per_tok


# ---- greedy decoding ----


def greedy(logits: Tensor) -> int:
    """Index of the largest logit, the lowest index among equal ones. They must be finite."""
    return int((logits == logits.max()).nonzero()[0])


def generate(
    decoder: ReferenceDecoder, prompt: Sequence[int], max_new: int, stop: frozenset[int]
) -> Iterator[tuple[Tensor, int | None]]:
    """Feed the prompt, then decode greedily: (logits [V], token chosen) for each position fed.

    The token is None within the prompt. Ends after `max_new` tokens or one of `stop`. Raises
    ArtifactError if logits are not finite.
    """
    for token in prompt[:-1]:
        yield decoder.step(token), None
    token = prompt[-1]
    for _ in range(max_new):
        logits = decoder.step(token)
        if not logits.isfinite().all():
            raise ArtifactError(
                f"logits at position {decoder.position - 1} are not finite",
                fix="Are the weights damaged? dsv2mk verify DIR",
            )
        token = greedy(logits)
        yield logits, token
        if token in stop:
            return


# ---- arithmetic ----


def _rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gamma; fp32, the mean in float64."""
    wide = x.double()
    return (wide * (wide.square().mean() + eps).rsqrt() * gamma.double()).float()


def _matvec(weight: Tensor, x: Tensor) -> Tensor:
    """weight [rows, columns] bf16 times x [columns]; float64 sums, [rows]."""
    wide = x.double()
    rows = max(1, _PIECE // weight.shape[1])
    return torch.cat([piece.double() @ wide for piece in torch.split(weight, rows)])


def _all_reduce(partials: list[Tensor]) -> Tensor:
    """Sum over ranks, in rank order, as every rank does it; fp32."""
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return total.float()
