"""The working set of one layer: the tensors of its backward pass that no loop over layers stacks.

The loop's backward pass reads what a layer kept, and XLA runs the products for gradients of weights
last. So the fullest moment is between the two products of a pair: the MLP's, when everything that
forward made is there, or attention's, when all that the MLP's products will take waits.
Bytes are of one device.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxptd.analysis.sizes import AttentionSizes, Sizes
from jaxptd.attention.obstacle import obstacle
from jaxptd.config import Config, Remat
from jaxptd.models.architecture import Sublayer
from jaxptd.models.families import family_of

ENDS = 3  # arrays like x: the last layer's output, its gradient, and the gradient on its way back
CHUNK = 512  # queries and keys of a product of `attention/xla.py`
SCORES = 2  # arrays of scores at once, in float32 and in the precision of activations


@dataclasses.dataclass(frozen=True)
class SublayerBytes:
    """Bytes of a pair of products.

    Args:
        x: the residual stream.
        taken: what the first product takes.
        first: what the first product makes.
        second: what the second product takes.
        gradient: the gradient of what it makes, of all rows that products take of it.
        weight: the larger matrix, in the precision of activations, if it is cast for the layer.
        moving: panels and messages while a product of backward runs.
        core: what attention's backward has beside q, k, v and their gradients; 0 in an MLP.
        is_mlp: whether it is an MLP.
        gathers: whether products take what is gathered over tp.
        again: whether backward gathers that again.
        scores: whether the core has arrays of scores.
    """

    x: int
    taken: int
    first: int
    second: int
    gradient: int
    weight: int
    moving: int
    core: int
    is_mlp: bool
    gathers: bool
    again: bool
    scores: bool

    @property
    def forward(self) -> int:
        """Tensors that forward makes up to the second product."""
        return self.x + self.taken + self.first + self.second

    def backward(self, remat: Remat) -> int:
        """Tensors between the backward passes of both products."""
        bytes_alive = self.forward + self.second + self.weight + self.moving + self.core
        if self.is_mlp:  # where it is made again, the product of its gradient makes it as it reads
            return bytes_alive + self.first - (self.second if computes_again(remat) else 0)
        # Whole scores are gone when products make the gradients of q, k and v of them; x that is
        # gathered again is there only later.
        later = self.taken if self.gathers and (self.again or remat == "dots") else 0
        return bytes_alive + (0 if self.scores else self.first) - later

    @property
    def waiting(self) -> int:
        """Tensors that wait for the products of weights: their operands, and gradients like x."""
        return self.streams + self.first + self.second

    @property
    def streams(self) -> int:
        """Arrays like x among them: its gradients, and what products take."""
        return 3 * self.x + self.taken + (self.taken if self.gathers else 0)


def computes_again(remat: Remat) -> bool:
    """True if backward makes the input of an MLP's second product again."""
    return remat in ("dots", "full")


def layer(sublayers: Sequence[SublayerBytes], remat: Remat, *, at_once: bool = False) -> int:
    """Bytes of a layer's tensors at the fullest moment of its backward pass.

    Args:
        sublayers: of the layer.
        remat: its policy.
        at_once: whether products for gradients of weights do not wait; in pipelines, where each is
            added to its sum, none does.
    """
    return max(_moments(sublayers, remat, at_once))


def _moments(sublayers: Sequence[SublayerBytes], remat: Remat, at_once: bool) -> Iterator[int]:
    """Bytes between the backward passes of the two products of each pair."""
    for i, sublayer in enumerate(sublayers):
        before = sum(each.forward for each in sublayers[:i])
        after = sum(each.streams if at_once else each.waiting for each in sublayers[i + 1 :])
        yield before + sublayer.backward(remat) + after + ENDS * sublayer.x


def sublayer_bytes(sizes: Sizes, sublayer: Sublayer) -> SublayerBytes:
    """The bytes of a pair's tensors."""
    layout, each = sizes.config.layout, sizes.of(sublayer)
    token = sizes.tokens * sizes.itemsize
    whole, shards = token * sizes.hidden, sizes.matrix_shards
    x = whole // (shards if layout.has_grid or layout.sequence_parallel else 1)
    gathers = layout.gathers_inputs
    second, rows = token * each.second // shards, max(each.first, each.second)
    first, core = second * each.first // each.second, 0
    if isinstance(each, AttentionSizes):
        kv = 2 * each.of_keys(sizes.rows) * each.keys * sizes.itemsize
        first, core = second + kv, _core(each, second, kv)
    return SublayerBytes(
        x=x,
        taken=whole if gathers else x,
        first=first,
        second=second,
        gradient=x if layout.has_grid else whole,
        # Parameters that a step casts at its beginning are not cast again.
        weight=0 if casts(sizes.config) else rows * sizes.hidden * sizes.itemsize // shards,
        moving=_moving(sizes, whole, rows * token),
        core=core,
        is_mlp=not isinstance(each, AttentionSizes),
        gathers=gathers,
        again=sizes.config.gathers_again,
        scores=isinstance(each, AttentionSizes) and not is_fused(sizes.config),
    )


def _moving(sizes: Sizes, x: int, hidden: int) -> int:
    """Messages of a product: x gathered and transposed, pieces of it, or panels.

    Args:
        sizes: of the layer.
        x: bytes of all rows of the residual stream.
        hidden: bytes of all of the pair's hidden units.
    """
    layout = sizes.config.layout
    if layout.has_grid:
        return hidden // layout.row
    if layout.collective_matmul:
        return x
    return 2 * x if layout.sequence_parallel else 0


def _core(each: AttentionSizes, queries: int, kv: int) -> int:
    """Beside q, k, v: sums of gradients along a ring in float32, rows or chunks of scores."""
    sizes, layout = each.sizes, each.sizes.config.layout
    narrow, wide, part = sizes.itemsize, sizes.master_itemsize, each.part
    both, ring = narrow + wide, layout.ring_size
    rows = sizes.rows * each.heads
    if sizes.has_blocks:
        return rows * part.key_tokens * 2 * wide
    total = 0
    if ring > 1:  # each hop has the sums of k and v that arrive, and those that leave
        total = (queries + kv * (2 if ring > 2 else 1)) * wide // narrow + kv
        if layout.context_parallel.exchange.whole_rows:
            return total + rows * part.key_tokens * both
    if not is_fused(sizes.config):
        halves = 1 + (ring > 1 and part.causal)  # of a block, see `ring_attention._at_once`
        queries_at_once = min(CHUNK, -(-part.tokens // ring // halves))
        keys_at_once = min(CHUNK, -(-part.key_tokens // ring // halves))
        total += sizes.sequences * each.heads * queries_at_once * keys_at_once * SCORES * both
        if queries_at_once < part.tokens // ring:  # sums over chunks
            total += (queries + kv) * wide // narrow
    return total


def are_apart(config: Config) -> bool:
    """True if queries, keys and values are products of their own; see `layers/megatron.py`."""
    layout, native = config.layout, config.model.products == "native"
    return native and not (layout.has_grid or layout.collective_matmul)


def casts(config: Config) -> bool:
    """True if a step reads parameters that it gathered or cast in the precision of activations."""
    layout = config.layout
    return (layout.zero > 0 or layout.hosts_parameters) and not layout.has_grid


def is_fused(config: Config) -> bool:
    """True if GPUs compute attention with a fused kernel; as `layers/attention` chooses it."""
    model, layout = config.model, config.layout
    if layout.unfused_attention or model.attention == "xla":
        return False
    reason = obstacle(
        "gpu",
        model.dtype,
        head_size=model.block.head_size,
        dropout=model.dropout,
        documents=family_of(model).has_documents(config),
        bias=model.block.relative is not None,
        window_in_ring=model.reach < model.seq_length and layout.ring_size > 1,
    )
    return reason is None


# ---- embedding and loss --------------------------------------------------------------------------
# The parts of a model outside its layers: the tables, and the logits. Bytes are of one device.


@dataclasses.dataclass(frozen=True)
class EndBytes:
    """Bytes outside the layers.

    Args:
        parameters: all, in the state's precision.
        gathered: all, in the precision of activations.
        narrow: the head's table in the precision of activations.
        gradient: of that, until it is added to others; a grid's is in the state's precision.
        product: both; on a grid of whole columns, which its products take, and the sum.
        logits: of one micro-batch, in that precision.
        x: the residual stream.
    """

    parameters: int
    gathered: int
    narrow: int
    gradient: int
    product: int
    logits: int
    x: int


def ends_of(config: Config) -> EndBytes:
    """The bytes outside a model's layers."""
    sizes, layout = Sizes(config), config.layout
    architecture, wide, hidden = sizes.architecture, sizes.master_itemsize, sizes.hidden
    table = sizes.vocab * hidden * wide // sizes.matrix_shards
    narrow = table * sizes.itemsize // wide
    positions = architecture.positions.rows * hidden if architecture.positions else 0
    squares = sum(head.squares for head in architecture.heads) * hidden**2
    tables = 1 if config.model.tie_embeddings else 2
    columns = sum(sizes.columns(head) for head in architecture.heads)
    parameters = tables * table + (positions + squares) * wide // (layout.row * layout.col)
    return EndBytes(
        parameters=parameters,
        gathered=parameters * sizes.itemsize // wide,
        narrow=narrow,
        gradient=table if layout.has_grid else narrow,
        product=(layout.row * (narrow + table) + table if layout.has_grid else 2 * narrow),
        logits=sizes.rows * columns // sizes.inner_devices * sizes.itemsize,
        x=sizes.streams[-1],
    )


# ---- the halves of a split backward --------------------------------------------------------------
# Bytes that the first half of a split backward, B, hands to its second, W, besides what is saved.
#
# W multiplies what each product takes with the gradient of what it makes. An array that B hands on
# takes the place of a saved one with its rows that W does not read, if one is left: see
# `PassedStorage`. Bytes are of one device, layer and micro-batch; arrays without tokens, such as
# the gradients of biases, are left out.


def handed_on(config: Config, sublayers: Sequence[SublayerBytes], remat: Remat) -> int:
    """Bytes that B hands to W and that take no saved array's place.

    Args:
        config: of the run.
        sublayers: of a layer.
        remat: its policy.
    """
    free = list(_free(config, sublayers, computes_again(remat)))
    left = 0
    for size in _handed(config, sublayers, remat):
        if size in free:
            free.remove(size)
        else:
            left += size
    return left


def _handed(config: Config, sublayers: Sequence[SublayerBytes], remat: Remat) -> Iterator[int]:
    """The arrays, in the order in which B makes them.

    What products take is saved, or B has computed it again. With collective matmul the gradient of
    what a pair makes is this device's piece; the others pass once more in W.
    """
    layout, again = config.layout, computes_again(remat)
    if again and not layout.has_grid and not _same_on_all(config):
        yield from (sublayer.x for sublayer in sublayers)
    for sublayer in reversed(sublayers):
        if layout.has_grid:
            computed_again = again if sublayer.is_mlp else remat in ("attention", "full")
            yield from (
                *[sublayer.second] * computed_again,
                sublayer.gradient,
                *[sublayer.taken] * again,
                sublayer.first,
            )
        elif layout.collective_matmul:
            yield from (sublayer.gradient // layout.tp, sublayer.first)
        else:
            yield from (sublayer.gradient, sublayer.first)


def _free(config: Config, sublayers: Sequence[SublayerBytes], again: bool) -> Iterator[int]:
    """The saved arrays that W does not read, in the order of forward."""
    layout = config.layout
    for sublayer in sublayers:
        yield from [] if _same_on_all(config) else [sublayer.x]
        if (
            sublayer.is_mlp and sublayer.first == sublayer.second
        ):  # of gated units saved rows are halves
            yield from [] if again and not layout.has_grid else [sublayer.first]


def _same_on_all(config: Config) -> bool:
    """True if x is the same on all devices of tp: only what products take again replaces it.

    So says its type, which does not know the size of tp.
    """
    return not config.layout.sequence_parallel and not config.layout.has_grid
