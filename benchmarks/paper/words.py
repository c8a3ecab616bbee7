"""The sentences of table 4's page: what communication can gain, and what it cannot."""

from collections.abc import Sequence
from typing import Protocol

from benchmarks.paper import published

GPUS = 4
INTRODUCTION = """\
All figures are of one H200 of four and of one step. Nothing was run or timed: the steps are
compiled, and `benchmarks/paper/table4.py` says what is counted. *Beside work*: the share of the
bytes sent that is under way during a product or an attention kernel. *All sent*: the time of all
messages at NVLink's 450 GB/s. *Predicted*: products and attention at 989.5 TFLOP/s, other kernels
at 4.3 TB/s, and the messages beside no work; a step takes longer. *With any links*: if no message
were hidden, the speedup is between these two, one with infinitely fast links, one with infinitely
slow ones. Where tp does not divide the heads there are fewer and wider ones. The paper has sizes of
GPT only; the other models' are made alike. *Published*: measured by the paper's authors on four RTX
4090, with other software."""


class Counted(Protocol):
    """The part of `table4.Step` that the sentences need."""

    @property
    def model(self) -> str: ...
    @property
    def flop(self) -> int: ...
    @property
    def is_grid(self) -> bool: ...
    @property
    def sent(self) -> int: ...


def gains(steps: Sequence[Counted]) -> str:
    """What communication can and cannot gain, of published and of counted numbers."""
    return f"## What communication can gain\n\n{_published()}\n\n{_counted(steps)}"


def _published() -> str:
    """The published numbers against each other."""
    tp, tp2d = published.hours("GPT", "TP"), published.hours("GPT", "TP2D")
    share, share2d = published.communication("TP"), published.communication("TP2D")
    moved, moved2d = tp * share, tp2d * share2d
    rest, rest2d = tp - moved, tp2d - moved2d
    outside = (rest - rest2d) / (tp - tp2d)
    return (
        f"By the paper's own figure 11 communication is {share:.1%} of a step of GPT with TP=4. "
        f"Without any of it\na step would be {1 / (1 - share):.2f} times as fast: that is the most "
        f"that another way to communicate can gain.\nThe published speedup is "
        f"{published.speedup('GPT'):.2f}. With TP2D the share is {share2d:.1%} (figure 12). So of "
        f"{tp:g} h {moved:.1f} are communication\nand {rest:.1f} are not; of {tp2d:g} h "
        f"{moved2d:.1f} and {rest2d:.1f}. {outside:.0%} of what was gained is outside "
        "communication, although\nboth layouts multiply the same matrices: it is in what the "
        "software of the two did beside them."
    )


def _counted(steps: Sequence[Counted]) -> str:
    """The published times and bytes against the counted ones."""
    gpt = [each for each in steps if each.model == "GPT"]
    if not gpt:
        return ""
    base, grids = gpt[0], [each for each in gpt if each.is_grid]
    seconds = published.iteration("GPT", "TP")
    rate = GPUS * base.flop / seconds / 1e12
    least = min(each.sent for each in grids) / base.sent
    return (
        f"An iteration of GPT took {seconds:,.0f} s, if the {published.hours('GPT', 'TP'):g} h are "
        "of the 300 iterations that the paper names. The\nproducts and attention of such a step, "
        f"here {GPUS * base.flop / 1e12:,.0f} TFLOP on all GPUs, would then run at "
        f"{rate:.2f} TFLOP/s on four GPUs that\nreach hundreds. What bounded those runs is neither "
        "products nor links, and no count predicts it.\n\n"
        "What can be counted says the opposite of the paper for 2 x 2: the grid sends at least "
        f"{least:.2f} times the bytes\nof TP=4, with every algorithm, so slower links make it "
        "slower, not faster. What it gains is memory, and\nhead counts that 2 divides and 4 does "
        "not. The grid sends less from 8 GPUs on, with many tokens for\neach weight: the page on "
        "grids in `docs/` has the condition."
    )
