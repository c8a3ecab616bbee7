"""Breaks of objectives that make batches, and of what is drawn, which show in statistics only."""

from benchmarks.breaks.table import Break

MASKING, SPANS = "tests/data/test_masking.py", "tests/data/test_spans.py"
OBJECTIVES = "tests/data/test_objectives.py"
WORDS = "tests/reference/test_draws.py"
DRAWS = "benchmarks/draws/test_draws.py"
DROPOUT = "jaxptd/layers/dropout.py"
SHIFTS = "    x, y, z, w = (v ^ (v >> 16) for v in (x, y, z, w))\n"
LAST = "    z = z + x * y\n    w = w + y * z\n    return x, y, z, w"


def _weaker(what: str, old: str, new: str, tests: str = DRAWS) -> Break:
    return Break(f"a weaker hash: {what}", DROPOUT, old, new, tests)


_HASH = (
    _weaker(
        "no sums before its products",
        " * jnp.uint32(1664525) + jnp.uint32(1013904223)",
        " * jnp.uint32(1664525)",
    ),
    _weaker("no fourth product in the first round", "    w = w + y * z\n" + SHIFTS, SHIFTS),
    _weaker("no shifts", SHIFTS, ""),
    _weaker("no first product in the second round", SHIFTS + "    x = x + y * w\n", SHIFTS),
    _weaker("no second product in the second round", "    y = y + z * x\n" + LAST, LAST),
    _weaker("no third product in the second round", LAST, LAST.partition("\n")[2]),
    _weaker(
        "no fourth product in the second round",
        "    w = w + y * z\n    return",
        "    return",
    ),
    # With these the words pass all statistics, but they are not the documented ones.
    _weaker("no factor before its products", "v * jnp.uint32(1664525) + ", "v + ", WORDS),
    _weaker(
        "no first product in the first round",
        "(x, y, z, w))\n    x = x + y * w\n    y = y + z * x\n    z = z + x * y\n"
        "    w = w + y * z\n    x, y",
        "(x, y, z, w))\n    y = y + z * x\n    z = z + x * y\n    w = w + y * z\n    x, y",
        WORDS,
    ),
    _weaker(
        "no second product in the first round",
        "    y = y + z * x\n    z = z + x * y\n    w = w + y * z\n    x, y",
        "    z = z + x * y\n    w = w + y * z\n    x, y",
        WORDS,
    ),
    _weaker(
        "no third product in the first round",
        "    z = z + x * y\n    w = w + y * z\n    x, y",
        "    w = w + y * z\n    x, y",
        WORDS,
    ),
)
_DRAWN = (
    Break(
        "one seed for all sites of a layer",
        DROPOUT,
        "_, _, z, w = _pcg4d(*_words(first, second,",
        "_, _, z, w = _pcg4d(*_words(first, 0,",
        DRAWS,
    ),
    Break(
        "sums of six numbers twice",
        "jaxptd/params.py",
        "(words & 0xFFFF) + (words >> 16)",
        "2 * (words & 0xFFFF)",
        DRAWS,
    ),
    Break(
        "all layers start alike",
        "jaxptd/layers/block.py",
        "keys = jax.random.split(rngs(), config.num_layers)",
        "keys = jnp.stack([rngs()] * config.num_layers)",
        DRAWS,
    ),
    Break(
        "all epochs in one order",
        "jaxptd/data/batches.py",
        "np.array([seed, epoch], dtype",
        "np.array([seed, 0], dtype",
        DRAWS,
    ),
    Break(
        "an order by the upper bits of numbers",
        "jaxptd/data/batches.py",
        'np.argsort(drawn[1:], kind="stable")',
        'np.argsort(drawn[1:] >> np.uint64(58), kind="stable")',
        DRAWS,
    ),
)
_OBJECTIVES = (
    Break(
        "a third of the pairs follow",
        "jaxptd/data/objectives/masking.py",
        "swapped_B = (drawn[:, 1] & np.uint64(1)).astype(bool)",
        "swapped_B = drawn[:, 1] % np.uint64(3) > 0",
        DRAWS,
    ),
    Break(
        "what happens to a predicted token follows from its place",
        "jaxptd/data/objectives/masking.py",
        "self._replace(token_BW[at], drawn[row, self.window + rank])",
        "self._replace(token_BW[at], drawn[at])",
        DRAWS,
    ),
    Break(
        "random tokens of the vocabulary's first half",
        "jaxptd/data/objectives/masking.py",
        "number % np.uint64(len(self._ordinary))",
        "number % np.uint64(len(self._ordinary) // 2)",
        DRAWS,
    ),
    Break(
        "second sentences of the next windows only",
        "jaxptd/data/objectives/masking.py",
        "drawn_B % np.uint64(size - 1)",
        "drawn_B % np.uint64(size // 2)",
        DRAWS,
    ),
    Break(
        "samples share three quarters of their numbers",
        "jaxptd/data/objectives/prepared.py",
        "counter=int(number_B[run[0]]) * steps",
        "counter=int(number_B[run[0]])",
        DRAWS,
    ),
    Break(
        "spans and the text between them from the same numbers",
        "jaxptd/data/objectives/spans.py",
        "_ends(drawn[:, kept:], spans)",
        "_ends(drawn[:, :cut], spans)",
        DRAWS,
    ),
    Break(
        "spans of the longest text are never short",
        "jaxptd/data/objectives/spans.py",
        "cuts = np.sort(shuffle(drawn_BN[:, 1:])[:, : pieces - 1], axis=1) + 1",
        "cuts = np.sort(shuffle(drawn_BN[:, 2:])[:, : pieces - 1], axis=1) + 2",
        DRAWS,
    ),
)

DATA = (
    # ---- draws ----
    Break(
        "samples share draws",
        "jaxptd/data/objectives/prepared.py",
        "counter=int(number_B[run[0]]) * steps",
        "counter=int(number_B[run[0]])",
        OBJECTIVES,
        "draw",
    ),
    Break(
        "draws of a run that has a gap",
        "jaxptd/data/objectives/prepared.py",
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
        "jaxptd/data/objectives/prepared.py",
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
        "jaxptd/data/objectives/prepared.py",
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
    Break(
        "a frame of zstd that was cut is an end",
        "jaxptd/data/records.py",
        "if self._frame is not None:",
        "if False:",
        "tests/data/test_signatures.py",
    ),
    Break(
        "split_special_tokens of a folder is not honoured",
        "jaxptd/data/tokenizers.py",
        '"text" if settings.get(SPLIT) is True else "parse"',
        '"parse"',
        "tests/data/test_special_tokens.py",
    ),
)

DRAWN = (*_HASH, *_DRAWN, *_OBJECTIVES)
