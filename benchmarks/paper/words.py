"""The sentences of table 4's page: what communication can gain, and what it cannot."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.paper import published

if TYPE_CHECKING:
    from benchmarks.paper.table4 import Step

GPUS, WIDTH = 4, 100
INTRODUCTION = """\
All figures are of one H200 of four and of one step. Nothing was run or timed: the steps are
compiled, and `benchmarks/paper/table4.py` says what is counted. *Beside work*: the share of the
bytes sent that is under way during a product or an attention kernel. *All sent*: the time of all
messages at NVLink's 450 GB/s. *Predicted*: products and attention at 989.5 TFLOP/s, other kernels
at 4.3 TB/s, and the messages beside no work; a step takes longer. *Nothing hidden*: the same with
all messages. *With any links*: the two ends of that speedup, infinitely slow and infinitely fast
links. Where tp does not divide the heads there are fewer and wider ones. The paper has sizes of GPT
only; the other models' are made alike. *Published*: measured by the paper's authors on four RTX
4090, with other software."""


def gains(models: Sequence[Sequence["Step"]]) -> str:
    """The gains that communication can and cannot bring, by published and by counted numbers.

    Args:
        models: of each model its steps; first TP=4, then the same with sequence parallelism.
    """
    paragraphs = [_shares(), *(_iteration(steps[0]) for steps in models[:1]), _bytes(models)]
    paragraphs += [_times(steps) for steps in models]
    paragraphs.append(
        "What 2 x 2 gains for certain is memory under `remat: none` (the page on grids in "
        "`docs/`), and numbers of heads that 2 divides and 4 does not. A grid sends less than TP "
        "from 8 GPUs on, with many tokens for each weight."
    )
    filled = (textwrap.fill(each, WIDTH, break_on_hyphens=False) for each in paragraphs)
    return "\n\n".join(["## What communication can gain", *filled])


def fastest_grid(steps: Sequence["Step"]) -> "Step":
    """The grid's step with the least predicted time."""
    return min((each for each in steps if each.is_grid), key=lambda each: each.seconds)


def _shares() -> str:
    """The published speedup against the published shares of communication."""
    tp, tp2d = published.hours("GPT", "TP"), published.hours("GPT", "TP2D")
    share, share2d = published.communication("TP"), published.communication("TP2D")
    moved, moved2d = tp * share, tp2d * share2d
    rest, rest2d = tp - moved, tp2d - moved2d
    outside = (rest - rest2d) / (tp - tp2d)
    return (
        f"By the paper's own figure 11 communication is {share:.1%} of a step of GPT with TP=4. "
        f"Without any of it a step would be {1 / (1 - share):.2f} times as fast: that is the most "
        "that another way to communicate can gain. The published speedup is "
        f"{published.speedup('GPT'):.2f}. With TP2D the share is {share2d:.1%} (figure 12). So of "
        f"{tp:g} h {moved:.1f} are communication and {rest:.1f} are not, of {tp2d:g} h "
        f"{moved2d:.1f} and {rest2d:.1f}: {outside:.0%} of what was gained is outside "
        "communication, although both layouts multiply the same matrices. It is in what the two "
        "programs did beside them."
    )


def _iteration(base: "Step") -> str:
    """The published time of an iteration against its products."""
    name, seconds = base.model, published.iteration(base.model, "TP")
    total = GPUS * base.flop / 1e12
    return (
        f"An iteration of {name} took {seconds:,.0f} s, if the {published.hours(name, 'TP'):g} h "
        "are of the 300 iterations that the paper names. The products and attention of such a "
        f"step, here {total:,.0f} TFLOP on all GPUs, then ran at {total / seconds:.2f} TFLOP/s on "
        "four GPUs that reach hundreds. What bounded those runs is neither products nor links, and "
        "no count predicts it."
    )


def _bytes(models: Sequence[Sequence["Step"]]) -> str:
    least = min(each.sent / steps[0].sent for steps in models for each in steps if each.is_grid)
    return (
        f"Counted, the grid of 2 x 2 sends more: at least {least:.2f} times the bytes of TP=4, "
        "with every model and algorithm, in more and smaller messages. It is predicted to be "
        "faster only where more of them run beside work, and where its other kernels move less, "
        "because each GPU has a quarter of the residual stream. Sequence parallelism gives TP=4 "
        "that too."
    )


def _times(steps: Sequence["Step"]) -> str:
    """A model's predicted speedups, and their bounds."""
    base, sequence_parallel = steps[:2]
    fastest = fastest_grid(steps)
    slow, fast = fastest.any_links(base)
    return (
        f"{base.model} over TP=4: {sequence_parallel.over(base):.2f} with sequence parallelism, "
        f"{fastest.over(base):.2f} with the fastest grid. With nothing hidden "
        f"the grid has {base.unhidden / fastest.unhidden:.2f}, and between {slow:.2f} and "
        f"{fast:.2f} with links of any speed. If all of its messages were hidden and none of "
        f"TP=4's, it would have {base.unhidden / fastest.computing:.2f}: with NVLink, the most "
        f"that communication can gain here. Published: {published.speedup(base.model):.2f}."
    )
