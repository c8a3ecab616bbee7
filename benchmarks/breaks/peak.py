"""Breaks of the peak memory model, of estimated times and of what is in host memory."""

from benchmarks.breaks.table import Break

MODEL, WORKING = "jaxptd/analysis/peak/model.py", "jaxptd/analysis/peak/working.py"
PARTS, ROWS = "tests/analysis/peak/test_model.py", "benchmarks/memory/test_peak.py"
TIMELINE = "tests/analysis/hlo/test_timeline.py"

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
        "return not self._sums and has_sum",
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
        "kept += self.between * handed_on(self.config, self.pairs, self.stack.remat)",
        "kept += 0",
        PARTS,
    ),
    Break(
        "an array of B takes the place of one that differs between devices",
        "jaxptd/pipeline/split_backward.py",
        "        *(y.size, y.dtype, y.manual_axis_type),",
        "        *(y.size, y.dtype, x.manual_axis_type),",
        "tests/analysis/peak/test_split.py tests/pipeline/test_training.py",
    ),
    Break(
        "all pieces of a gradient wait for W",
        "jaxptd/analysis/peak/split.py",
        "yield from (pair.gradient // layout.tp, pair.first)",
        "yield from (pair.gradient, pair.first)",
        "tests/analysis/peak/test_split.py",
    ),
    # ---- estimated times ----
    Break(
        "a link sends any number of messages at once",
        "jaxptd/analysis/hlo/timeline.py",
        "max(free.get(link, 0.0), clock) + seconds",
        "clock + seconds",
        TIMELINE,
    ),
    Break(
        "kernels before a collective hide it",
        "jaxptd/analysis/hlo/timeline.py",
        "free.get(link, 0.0), clock) + seconds",
        "free.get(link, 0.0), 0.0) + seconds",
        TIMELINE,
    ),
    Break(
        "the gradient of attention has the products of attention",
        "jaxptd/analysis/hlo/products.py",
        "5 if",
        "2 if",
        TIMELINE,
    ),
    # ---- host memory ----
    Break(
        "parameters of all layers leave host memory at the beginning of a step",
        "jaxptd/zero/zero.py",
        "        if self.is_fetched(name):",
        "        if self.is_fetched(name) and self.stage == 3:",
        "tests/step/test_offloaded_parameters.py",
        "one_by_one",
    ),
    Break(
        "a pipeline's pools stay on the device",
        "jaxptd/step/keeping.py",
        'on_host if remat == "dots" else _as_it_is',
        "_as_it_is",
        "tests/step/test_offload.py",
        "pools",
    ),
    Break(
        "the whole state comes from host memory at once",
        "jaxptd/step/update.py",
        "        if not is_on_host(x):",
        "        if True:",
        "tests/step/test_offloaded_parameters.py",
        "for_the_update",
    ),
    Break(
        "the host leaves the update to the device",
        "jaxptd/step/update.py",
        'if config.layout.update_on == "host":',
        "if False:",
        "tests/step/test_update_on_host.py",
        "gradients_go_down",
    ),
    Break(
        "peak: a loop's gradients have the state's precision",
        "jaxptd/analysis/peak/model.py",
        "narrow = self.config.narrows or (",
        "narrow = (",
        "tests/analysis/peak/test_model.py",
    ),
    Break(
        "peak: nothing sums the gradients that an update reads",
        "jaxptd/analysis/peak/model.py",
        "gradients=gradients - layers + layers // narrowing",
        "gradients=gradients",
        "benchmarks/memory/test_peak.py",
    ),
    Break(
        "peak: untied logits never wait for a sum over tp",
        "jaxptd/analysis/peak/model.py",
        "(layout.cp > 1 if tied else layout.sequence_parallel)",
        "(layout.cp > 1 and tied)",
        "benchmarks/memory/test_peak.py",
    ),
)
