"""Breaks of the objectives that make batches of windows of the corpus."""

from benchmarks.breaks.table import Break

MASKING, SPANS = "tests/data/test_masking.py", "tests/data/test_spans.py"
OBJECTIVES = "tests/data/test_objectives.py"

DATA = (
    # ---- draws ----
    Break(
        "samples share draws",
        "jaxptd/data/objectives/draws.py",
        "counter=int(number_B[run[0]]) * steps",
        "counter=int(number_B[run[0]])",
        OBJECTIVES,
        "draw",
    ),
    Break(
        "draws of a run that has a gap",
        "jaxptd/data/objectives/draws.py",
        "np.diff(number_B) != 1",
        "np.diff(number_B) < 1",
        MASKING,
        "function_of_seed",
    ),
    Break(
        "validation is drawn with the seed of training",
        "jaxptd/data/__init__.py",
        "Prepared(data.validation, objective, seed=0)",
        "Prepared(data.validation, objective, seed=seed)",
        OBJECTIVES,
        "splits",
    ),
    Break(
        "special ids beyond the model's vocabulary",
        "jaxptd/data/__init__.py",
        "check_vocabulary(objective.vocab_size, vocab_size)",
        "check_vocabulary(1, vocab_size)",
        OBJECTIVES,
        "special_ids",
    ),
    Break(
        "ids beyond the vocabulary are read",
        "jaxptd/data/batches.py",
        "(rows < 0) | (rows >= self.vocab_size)",
        "rows < 0",
        "tests/data/test_batches.py",
    ),
    # ---- masked tokens and pairs ----
    Break(
        "special tokens are predicted",
        "jaxptd/data/objectives/masking.py",
        "np.isin(token_BW, self.ids.special)",
        "np.isin(token_BW, ())",
        MASKING,
        "special_tokens",
    ),
    Break(
        "the end of a document is predicted",
        "jaxptd/data/objectives/special.py",
        "self.mask, self.end_of_document)",
        "self.mask)",
        MASKING,
        "special_tokens",
    ),
    Break(
        "next sentence turned round",
        "jaxptd/data/objectives/masking.py",
        "swapped_B.astype(np.int32)",
        "(~swapped_B).astype(np.int32)",
        MASKING,
        "label",
    ),
    Break(
        "B of another epoch",
        "jaxptd/data/objectives/masking.py",
        "return epoch_B * size + (place_B",
        "return (epoch_B + 1) * size + (place_B",
        MASKING,
        "epoch",
    ),
    Break(
        "tokens are masked by the draw that chose them",
        "jaxptd/data/objectives/masking.py",
        "drawn[row, self.window + rank]",
        "drawn[at]",
        MASKING,
        "replaced_or_kept",
    ),
    Break(
        "random tokens may be special",
        "jaxptd/data/objectives/masking.py",
        "np.arange(self.ids.vocab_size, dtype=np.int32), self.ids.special",
        "np.arange(self.ids.vocab_size, dtype=np.int32), ()",
        MASKING,
        "replaced_or_kept",
    ),
    Break(
        "the first [SEP] is of B",
        "jaxptd/data/objectives/masking.py",
        "place_T > split_B1 + 1",
        "place_T > split_B1",
        MASKING,
        "cls_a_sep",
    ),
    # ---- spans ----
    Break(
        "sentinels in ascending order",
        "jaxptd/data/objectives/special.py",
        "in reversed(range(SENTINELS))",
        "in range(SENTINELS)",
        SPANS,
        "ids",
    ),
    Break(
        "the end is not counted",
        "jaxptd/data/objectives/spans.py",
        "return self.kept + self.spans + 1",
        "return self.kept + self.spans",
        SPANS,
        "lengths",
    ),
    Break(
        "sentinels of targets behind their spans",
        "jaxptd/data/objectives/spans.py",
        "self._mark(targets, first_BP,",
        "self._mark(targets, cut_BP,",
        SPANS,
        "window_follows",
    ),
    Break(
        "short spans are likelier",
        "jaxptd/data/objectives/spans.py",
        "shuffle(drawn_BN[:, 1:])[:, : pieces - 1]",
        "shuffle(drawn_BN[:, 1:] >> np.uint64(43))[:, : pieces - 1]",
        SPANS,
        "as_likely",
    ),
    Break(
        "padding of the source is seen",
        "jaxptd/data/objectives/spans.py",
        "np.arange(self.seq_length) < self.lengths.source",
        "np.arange(self.seq_length) >= 0",
        SPANS,
        "window_follows",
    ),
)
