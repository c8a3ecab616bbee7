"""Breaks of the peak memory model: each would predict other bytes without an error."""

from benchmarks.breaks.table import Break

MODEL, WORKING = "jaxptd/analysis/peak/model.py", "jaxptd/analysis/peak/working.py"
PARTS, ROWS = "tests/analysis/peak/test_model.py", "benchmarks/memory/test_peak.py"

PEAK = (
    Break(
        "the peak forgets the sums of gradients over micro-batches",
        MODEL,
        'return self.state["gradients"] if self.config.train.micro_batches > 1 else 0',
        "return 0",
        PARTS,
    ),
    Break(
        "the peak forgets what products for gradients of weights take",
        WORKING,
        "return self.streams + self.first + self.second",
        "return self.streams",
        PARTS,
    ),
    Break(
        "the logits never wait for a sum over devices",
        MODEL,
        "return not self._sums and (over_tokens or (tied and layout.has_grid))",
        "return False",
        ROWS,
    ),
    Break(
        "a ring's sums of gradients take 16 bits in the peak",
        WORKING,
        "found = (queries + kv * (2 if ring > 2 else 1)) * wide // narrow + kv",
        "found = queries + kv * (2 if ring > 2 else 1) + kv",
        ROWS,
    ),
    Break(
        "a split backward hands nothing on in the peak",
        "jaxptd/analysis/peak/loops.py",
        "pools = one * self.stack.micro_batches + self._between() * self.between",
        "pools = one * self.stack.micro_batches",
        PARTS,
    ),
)
