"""Breaks of packaged configs and of the pages beside published papers: each shows other figures."""

from benchmarks.breaks.table import Break

PAPER = "benchmarks/paper"

PAPERS = (
    Break(
        "configs of subfolders are not found",
        "jaxptd/config/packaged.py",
        'found = folder.rglob(f"*{SUFFIX}")',
        'found = folder.glob(f"*{SUFFIX}")',
        "tests/config/test_packaged.py",
    ),
    Break(
        "a packaged config comes before a file of its name",
        "jaxptd/config/packaged.py",
        "if stem in configs and not os.path.isfile(name):",
        "if stem in configs:",
        "tests/config/test_packaged.py",
    ),
    Break(
        "the paper's FLOPs without logits",
        "jaxptd/planner/published/rows.py",
        "more = 1 + T / (6 * D) + shape.vocab_size / (16 * L * D)",
        "more = 1 + T / (6 * D)",
        f"{PAPER}/test_weak_scaling.py",
        "products",
    ),
    Break(
        "the rate of one GPU as that of all",
        f"{PAPER}/weak_scaling.py",
        "return self.row.flops / self.seconds / PETA",
        "return self.row.flops / self.seconds / self.gpus / PETA",
        f"{PAPER}/test_weak_scaling.py",
    ),
    Break(
        "a step fits where its state does",
        f"{PAPER}/memory.py",
        "return self.peak <= size",
        "return self.state <= size",
        f"{PAPER}/test_grid_rows.py",
    ),
    Break(
        "as many sequences on 8 GPUs as on 4",
        f"{PAPER}/grid_rows.py",
        "return SEQUENCES * self.gpus",
        "return SEQUENCES * 4",
        f"{PAPER}/test_grid_rows.py",
    ),
)
