"""Swin and Swin-UNet in numpy: images and labels -> the training loss.

Written from the papers, patch by patch, with features in the order (c, q) that `docs/models.md`
gives. Letters: B images, R rows, Q columns, C hidden units, W windows, T patches of a window.
Source: Liu et al., arXiv 2103.14030; Cao et al., arXiv 2105.05537.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from reference import layers
from reference.draws import DropoutSite, Masks, pcg4d
from reference.layers import Options, Params, Part
from reference.tape import Value, einsum, logsumexp, power, softmax

PATHS = (6, 7)  # sites of dropped paths, after attention and after the MLP
Batch = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a model of images.

    Args:
        patch: side of a patch in pixels.
        window: side of a window in patches.
        depths: blocks of each level.
        decoder_depths: blocks of each level on the way up, finest first; empty for a classifier
            of images.
        classes: number of classes of pixels or of images.
        drop_path: rate of the last block on the way down.
    """

    patch: int
    window: int
    depths: tuple[int, ...]
    decoder_depths: tuple[int, ...]
    classes: int
    drop_path: float = 0.0


def arranged(x: Value, arrange: Callable[[np.ndarray], np.ndarray]) -> Value:
    """x with its elements rearranged. arrange: a function that only moves elements."""
    place = arrange(np.arange(x.x.size).reshape(x.shape))

    def vjp(g: np.ndarray) -> np.ndarray:
        back = np.zeros(x.x.size, g.dtype)
        back[place.reshape(-1)] = g.reshape(-1)
        return back.reshape(x.shape)

    return Value(x.x.reshape(-1)[place], (x, vjp))


def gathered(x: np.ndarray, side: int) -> np.ndarray:
    """x[B, R, Q, C] -> [B, R / side, Q / side, C side**2]; elements of the same c are adjacent."""
    rows = x.shape[1] // side
    found = [[x[:, i::side, j::side] for j in range(side)] for i in range(side)]
    whole = np.stack([each for row in found for each in row], -1)
    return whole.reshape(len(x), rows, -1, x.shape[3] * side**2)


def scattered(x: np.ndarray, side: int) -> np.ndarray:
    """Undoes `gathered`."""
    B, rows, cols, size = x.shape
    whole = np.empty((B, rows * side, cols * side, size // side**2), x.dtype)
    for q in range(side**2):
        whole[:, q // side :: side, q % side :: side] = x[..., q :: side**2]
    return whole


def windows(x: np.ndarray, size: int) -> np.ndarray:
    """x[B, R, Q, ..] -> [B, W, T, ..]."""
    starts = [(i, j) for i in range(0, x.shape[1], size) for j in range(0, x.shape[2], size)]
    cut = [x[:, i : i + size, j : j + size] for i, j in starts]
    return np.stack([each.reshape(len(x), size**2, *x.shape[3:]) for each in cut], 1)


def unwindowed(x: np.ndarray, size: int, rows: int) -> np.ndarray:
    """Undoes `windows`, for square images."""
    whole, across = np.empty((len(x), rows, rows, *x.shape[3:]), x.dtype), rows // size
    for w in range(x.shape[1]):
        i, j = w // across * size, w % across * size
        whole[:, i : i + size, j : j + size] = x[:, w].reshape(len(x), size, size, *x.shape[3:])
    return whole


def product(x: Value, own: Part) -> Value:
    """A matmul with `w[C, q, C']` or `w[C, C', q]`, read as a matrix."""
    w = own("w")
    rows = x.shape[-1]
    y = einsum("BRQC,CD->BRQD", x, arranged(w, lambda i: i.reshape(rows, -1)))
    return y + own("b") if own.has("b") else y


@dataclasses.dataclass(frozen=True)
class Model:
    """The parameters, options and masks of a step."""

    params: Params
    sizes: Sizes
    options: Options
    masks: Masks

    def part(self, name: str, layer: int | None = None) -> Part:
        return Part(self.params, f"{name}.", layer)

    def norm(self, x: Value, name: str) -> Value:
        return layers.norm(x, self.part(name), self.options)

    def dropped(self, x: Value, number: int, site: DropoutSite) -> Value:
        B, rows, cols, size = x.shape
        factors = self.masks.residual(number, site, (B, rows * cols, size))
        return x * factors.reshape(x.shape)

    def path(self, y: Value, number: int, site: int, rate: float) -> Value:
        """Drops y for a share of samples; the rate is rounded to float32."""
        near = np.float32(rate)
        word = pcg4d(np.arange(len(y.x)), 0, *self.masks._at(number, site))[3]
        kept = word >> np.uint64(8) >= int(near * np.float32(2**24))
        return y * (kept / (1 - float(near))).reshape(-1, 1, 1, 1)

    def attention(self, x: Value, own: Part, number: int, shifted: bool) -> Value:
        rows = x.shape[1]
        size = min(self.sizes.window, rows)
        shift = self.sizes.window // 2 if shifted and rows > self.sizes.window else 0
        qkv = layers.linear(x, own.part("qkv"), "BRQC,CDNH->BRQDNH")
        qkv = arranged(qkv, lambda i: windows(np.roll(i, (-shift, -shift), (1, 2)), size))
        q, k, v = (qkv[:, :, :, i] for i in range(3))
        scores = einsum("BWTNH,BWSNH->BWNTS", q, k) * q.shape[-1] ** -0.5
        scores = scores + self._bias(own("window_bias.table"), size)
        seen = self._seen(rows, size, shift)
        p = softmax(scores, np.broadcast_to(seen, scores.shape))
        p = p * self._kept(scores.shape, rows, size, number)
        o = einsum("BWNTS,BWSNH->BWTNH", p, v)
        o = arranged(o, lambda i: np.roll(unwindowed(i, size, rows), (shift, shift), (1, 2)))
        return layers.linear(o, own.part("out"), "BRQNH,NHC->BRQC")

    def _bias(self, table: Value, size: int) -> Value:
        """The bias of each score by the key's position relative to the query, `[N, T, S]`."""
        wide, T = 2 * size - 1, range(size**2)
        number = [
            [(t // size - s // size + size - 1) * wide + t % size - s % size + size - 1 for s in T]
            for t in T
        ]
        return table[np.array(number)].moved(2, 0)

    def _seen(self, rows: int, size: int, shift: int) -> np.ndarray:
        """True for patches of a window that were neighbours before the roll, `[W, 1, T, S]`."""
        place = np.roll(np.arange(rows), -shift)
        far = np.indices((rows, rows))
        both = [windows(place[each][None], size)[0] for each in far]
        near = [abs(x[:, :, None] - x[:, None, :]) < size for x in both]
        return (near[0] & near[1])[:, None]

    def _kept(self, shape: tuple[int, ...], rows: int, size: int, number: int) -> np.ndarray:
        """Factors for probabilities, by the positions of two patches in the rolled image."""
        B, W, N, T, _ = shape
        place = windows(np.arange(rows**2).reshape(1, rows, rows), size)[0]
        whole = self.masks.scores(number, DropoutSite.PROBABILITIES, (B, N, rows**2, rows**2))
        cut = [whole[:, :, place[w][:, None], place[w][None, :]] for w in range(W)]
        return np.stack(cut, 1).reshape(B, W, N, T, T)

    def block(self, x: Value, own: Part, number: int, rate: float) -> Value:
        h = layers.norm(x, own.part("attention_norm"), self.options)
        h = self.attention(h, own.part("attention"), number, number % 2 == 1)
        x = x + self.path(self.dropped(h, number, DropoutSite.ATTENTION), number, PATHS[0], rate)
        h = layers.norm(x, own.part("mlp_norm"), self.options)
        h = layers.linear(h, own.part("mlp.up"), "BRQC,CF->BRQF")
        h = layers.ACTIVATIONS[self.options.activation](h)
        h = layers.linear(h, own.part("mlp.down"), "BRQF,FC->BRQC")
        return x + self.path(self.dropped(h, number, DropoutSite.MLP), number, PATHS[1], rate)

    def level(self, x: Value, name: str, first: int, rates: list[float]) -> Value:
        for index, rate in enumerate(rates):
            own = self.part(f"{name}.{'second' if index % 2 else 'first'}", index // 2)
            x = self.block(x, own, first + index, rate)
        return x

    def encoded(self, image: np.ndarray) -> tuple[Value, list[Value], int]:
        """Returns x after the last level, x before each level's blocks, and the block count."""
        sizes, w = self.sizes, self.params["patches.w"]
        pixels = Value(gathered(np.asarray(image, np.float64), sizes.patch))
        matrix = arranged(w, lambda i: i.reshape(-1, i.shape[-1]))
        x = einsum("BRQP,PC->BRQC", pixels, matrix) + self.params["patches.b"]
        x = self.dropped(self.norm(x, "patches.norm"), 0, DropoutSite.EMBEDDING)
        done, before = 0, []
        for number, depth in enumerate(sizes.depths):
            if number:
                x = self.norm(arranged(x, lambda i: gathered(i, 2)), f"merge{number}.norm")
                x = product(x, self.part(f"merge{number}.linear"))
            before.append(x)
            x = self.level(x, f"down{number}", done, self.rates(number))
            done += depth
        return self.norm(x, "norm"), before, done

    def rates(self, number: int) -> list[float]:
        """Rates at which the blocks of a level are dropped."""
        depths = self.sizes.depths
        first, last = sum(depths[:number]), sum(depths) - 1
        return [self.sizes.drop_path * (first + i) / last for i in range(depths[number])]

    def expanded(self, x: Value, name: str, side: int) -> Value:
        x = arranged(product(x, self.part(f"{name}.linear")), lambda i: scattered(i, side))
        return self.norm(x, f"{name}.norm")

    def pixels(self, image: np.ndarray) -> Value:
        """Logits of pixels, `[B, rows, columns, K]`."""
        x, before, done = self.encoded(image)
        for number in reversed(range(len(self.sizes.decoder_depths))):
            x = self.expanded(x, f"expand{number}", 2)
            x = product(beside(x, before[number]), self.part(f"skip{number}.linear"))
            x = self.level(x, f"up{number}", done, self.rates(number))
            done += self.sizes.decoder_depths[number]
        x = self.expanded(self.norm(x, "last_norm"), "pixels", self.sizes.patch)
        return einsum("BRQC,CK->BRQK", x, self.params["head.w"])


def beside(x: Value, other: Value) -> Value:
    """Interleaves x[.., C] with another -> [.., 2 C]."""

    def woven(g: np.ndarray, i: int) -> np.ndarray:
        return g[..., i::2]

    whole = np.stack([x.x, other.x], -1).reshape(*x.shape[:-1], -1)
    return Value(whole, (x, lambda g: woven(g, 0)), (other, lambda g: woven(g, 1)))


def swin(model: Model, batch: Batch) -> Value:
    """The loss of an image classifier."""
    x, _, _ = model.encoded(batch["image"])
    B, rows, cols, size = x.shape
    flat = arranged(x, lambda i: i.reshape(B, rows * cols, size))
    pooled = einsum("BTC,TO->BOC", flat, np.full((rows * cols, 1), 1 / (rows * cols)))
    logits = einsum("BOC,CK->BOK", pooled, model.params["head.w"]) + model.params["head.b"]
    return layers.cross_entropy(logits, batch["label"][:, None])


def swin_unet(model: Model, batch: Batch, together: bool = False) -> tuple[Value, Value]:
    """Cross-entropy of pixels, and the mean Dice loss over images; ignored pixels do not count.

    together: whether one Dice loss covers the pixels of all images of the batch.
    """
    logits, label = model.pixels(batch["image"]), batch["label"]
    K, counted = model.sizes.classes, label >= 0
    target = np.eye(K)[np.where(counted, label, 0)] * counted[..., None]
    log_z = arranged(logsumexp(logits), lambda i: i[..., None])
    p = exp(logits - log_z) * counted[..., None]

    B = len(label)
    alike = np.ones((B, B)) if together else np.eye(B)  # pairs of images that share sums

    def sums(x: Value) -> Value:
        own = einsum("BRQK,RQ->BK", x, np.ones(label.shape[1:]))
        return einsum("BK,AB->AK", own, alike)

    smooth = 1e-5
    above = sums(p * target) * 2 + smooth
    below = sums(p * p) + alike @ target.sum((1, 2)) + smooth
    each = (above * power(below, -1) * -1 + 1).mean()[:, 0]
    dice = (each * (counted.sum((1, 2)) / counted.sum())).sum()
    return layers.cross_entropy(logits, label), dice


def exp(x: Value) -> Value:
    y = np.exp(x.x)
    return Value(y, (x, lambda g: g * y))
