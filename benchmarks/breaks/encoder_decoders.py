"""Breaks of encoder-decoders: two sequences of a sample, biases by distance, answers."""

from benchmarks.breaks.table import Break

MODEL = "tests/models/test_encoder_decoder.py"
ANSWERS = "tests/generate/test_answers.py"
TRAFFIC = "tests/analysis/test_traffic.py"
MEMORY = "tests/analysis/test_memory_model.py"

ENCODER_DECODERS = (
    Break(
        "a decoder reads the targets that it predicts",
        "jaxptd/models/encoder_decoder.py",
        "np.pad(targets_BT, ((0, 0), (1, 0)), constant_values=start)[:, :-1]",
        "targets_BT",
        MODEL,
        "reads",
    ),
    Break(
        "inputs are not made of the targets",
        "jaxptd/step/batch.py",
        "return derived.make(rows(derived.field, numbers))",
        "return rows(derived.field, numbers)",
        MODEL,
        "shifted",
    ),
    Break(
        "an encoder and cross-attention see padding",
        "jaxptd/models/encoder_decoder.py",
        'return batch["source_mask"] - 1',
        'return batch["source_mask"] * 0',
        MODEL,
        "padding",
    ),
    Break(
        "the encoder is causal",
        "jaxptd/models/t5.py",
        "_stack_of(config, config.num_layers, causal=False)",
        "_stack_of(config, config.num_layers)",
        MODEL,
        "stack_has",
    ),
    Break(
        "the decoder has biases for the source's length",
        "jaxptd/models/t5.py",
        "seq_length=config.target_length",
        "seq_length=config.seq_length",
        MODEL,
        "stack_has",
    ),
    Break(
        "stacks of an encoder-decoder forget which layers recompute",
        "jaxptd/models/t5.py",
        "remat_layers=None if first is None else min(first, layers)",
        "remat_layers=None",
        MODEL,
        "own_loops",
    ),
    Break(
        "a query itself is in a bucket of keys after it",
        "jaxptd/layers/attention/relative.py",
        "both_ways & (distance_R > 0)",
        "both_ways & (distance_R >= 0)",
        MODEL,
        "buckets",
    ),
    Break(
        "the last bucket of single distances is shared",
        "jaxptd/layers/attention/relative.py",
        "np.where(far_R < single, far_R, shared_R)",
        "np.where(far_R < single - 1, far_R, shared_R)",
        MODEL,
        "buckets",
    ),
    Break(
        "what devices owe of a bias table on a grid of blocks is not summed",
        "jaxptd/layers/attention/relative.py",
        "over=axes.score_axes,",
        "over=(),",
        TRAFFIC,
        "blocks and t5",
    ),
    Break(
        "keys of a source are counted with the length of its targets",
        "jaxptd/analysis/traffic/one_way.py",
        "size = _size(step.with_tokens(attention.part.source))",
        "size = _size(step)",
        f"{TRAFFIC} -m slow",
        "t5 and sequence_parallel and zero",
    ),
    Break(
        "the source that a decoder keeps is not counted",
        "jaxptd/analysis/memory_model.py",
        "        yield from _source(config, pair)\n",
        "",
        MEMORY,
        "t5",
    ),
    Break(
        "a source is encoded for every token of an answer",
        "jaxptd/models/t5.py",
        "return source if cache is None else self.cross.encode(source)",
        "return source",
        f"{ANSWERS} -m slow",
        "whole_source and device",
    ),
    Break(
        "an answer goes on behind its end",
        "jaxptd/generate.py",
        "Generator(program, vocab_size, sampling, tokenizer.ends)",
        "Generator(program, vocab_size, sampling)",
        ANSWERS,
        "alone",
    ),
)
