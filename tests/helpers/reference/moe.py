"""A mixture of experts as plain loops over tokens, over a token's experts, and over groups.

    y = sum over a token's experts e of weight_e MLP_e(x), plus an MLP shared by all tokens

Choices are discrete, so they have no gradient.
Letters: B batch, T position, D model, E experts.

Source: Shazeer et al., arXiv 1701.06538; Fedus et al., arXiv 2101.03961 (load balancing); Zoph
et al., arXiv 2202.08906 (z-loss); DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
"""

import numpy as np

from reference.layers import MoE, Options, Part, linear, mean_over_targets, mlp
from reference.tape import Value, constant, einsum, logsumexp, power, sigmoid, softmax, stacked

TINY = 1e-20  # added to the sum of a token's scores
Counts = dict[str, np.ndarray]


class Routers:
    """The MLPs of a forward pass, with or without experts, and the record of their routers.

    chosen: layer with experts -> the experts of each token, best first. counts: name of the bias
    that counts tokens -> the tokens of each expert in each layer of a stack.
    """

    def __init__(self, options: Options) -> None:
        self.options, self.terms = options, list[Value]()
        self.chosen: list[np.ndarray] = []
        self.counts: Counts = {}

    def __call__(self, x: Value, own: Part) -> Value:
        if not own.has("router.w"):
            return mlp(x, own, self.options)
        y = self.routed(x, own)
        if own.has("shared.up.w"):
            shared = mlp(x, own.part("shared"), self.options)
            if own.has("shared_gate.w"):
                shared = shared * sigmoid(einsum("BTD,DC->BTC", x, own("shared_gate.w")))
            y = y + shared
        return y

    def routed(self, x: Value, own: Part) -> Value:
        """The weighted sum of each token's experts."""
        moe = self.options.moe
        logits = linear(x, own.part("router"), "BTD,DE->BTE")
        everywhere = np.ones(logits.shape, bool)
        scores = softmax(logits, everywhere) if moe.score == "softmax" else sigmoid(logits)
        rank = scores.x.real + own("router.load_bias").x.real
        places = list(np.ndindex(rank.shape[:2]))
        chosen = {place: choice(rank[place], moe) for place in places}
        self.count(chosen, own, rank)
        self.add_losses(logits, scores, chosen)
        sums, place = [], () if own.layer is None else (own.layer,)
        for b, t in places:
            total, y = constant(TINY), constant(0.0)
            for e in chosen[b, t]:
                total = total + scores[b, t, e]
            for e in chosen[b, t]:
                expert = Part(own.params, own.prefix, (*place, e))
                y_e = mlp(x[b : b + 1, t : t + 1], expert, self.options)
                weight = scores[b, t, e] * (power(total, -1) if moe.normalize else 1.0)
                y = y + y_e[0, 0] * weight * moe.scale
            sums.append(y)
        return stacked(sums, rank.shape[:2])

    def count(self, chosen: dict, own: Part, rank: np.ndarray) -> None:
        """Records the choices of a layer."""
        name = f"{own.prefix}router.load_bias"
        layers = self.counts.setdefault(name, np.zeros(own.params[name].shape))
        for experts in chosen.values():
            for e in experts:
                layers[e if own.layer is None else (own.layer, e)] += 1
        self.chosen.append(np.array(list(chosen.values())).reshape(*rank.shape[:2], -1))

    def add_losses(self, logits: Value, scores: Value, chosen: dict) -> None:
        """Records the weighted terms that a router adds to each token's loss.

        Balance: E times the sum over experts of share times probability; the share of the choices
        in the token's sequence is a constant.
        """
        moe, size = self.options.moe, logits.shape[-1]
        if moe.balance_loss:
            share = np.zeros((logits.shape[0], size))
            for (b, _), experts in chosen.items():
                for e in experts:
                    share[b, e] += 1 / (logits.shape[1] * len(experts))
            total = scores.mean() * size
            balance = einsum("BTE,BE->BT", scores * power(total, -1), share) * size
            self.terms.append(balance * moe.balance_loss)
        if moe.z_loss:
            self.terms.append(power(logsumexp(logits), 2) * moe.z_loss)

    def loss(self, targets: np.ndarray) -> Value:
        """The sum of all layers, averaged over the tokens with a target."""
        total = constant(0.0)
        for term in self.terms:
            total = total + mean_over_targets(term, targets)
        return total


def choice(rank: np.ndarray, moe: MoE) -> list[int]:
    """Indices of a token's experts, best first; ties go to the lower index."""
    size = len(rank) // moe.groups
    groups = [range(g * size, (g + 1) * size) for g in range(moe.groups)]

    def score(group: range) -> float:
        best = sorted((rank[e] for e in group), reverse=True)
        return sum(best[: 2 if moe.group_score == "best_two" else 1])

    kept = sorted(groups, key=score, reverse=True)[: moe.top_groups]
    experts = sorted(e for group in kept for e in group)
    return sorted(experts, key=lambda e: rank[e], reverse=True)[: moe.chosen]


def sparse(layer: int, moe: MoE | None) -> bool:
    """True if the layer has experts."""
    if moe is None or layer < moe.first_dense or layer in moe.dense_layers:
        return False
    return (layer + 1) % moe.every == 0


def stacks(options: Options) -> list[tuple[str, int]]:
    """The prefix of each layer's stack, and the layer's index in it.

    Neighbours of the same kind form a stack, named after its first layer; a single stack is
    `blocks`. Where heads differ in width, those of a period have names in it.
    """
    if period := len(options.head_sizes):
        return [(f"blocks.layer_{i % period}.", i // period) for i in range(options.layers)]
    first, places = 0, []
    for layer in range(options.layers):
        if layer and sparse(layer, options.moe) != sparse(layer - 1, options.moe):
            first = layer
        places.append((first, layer - first))
    several = first > 0
    return [(f"blocks_{first}." if several else "blocks.", number) for first, number in places]
