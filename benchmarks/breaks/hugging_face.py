"""Breaks of Hugging Face's weights and configs, in and out, and of scores on published tasks."""

from benchmarks.breaks.table import Break

DIRECTORIES = "tests/hf/test_directory.py"
BERT, T5 = "tests/hf/families/test_bert.py", "tests/hf/families/test_t5.py"
SCORES_TEST, HARNESS_TEST = "tests/api/test_scoring.py", "tests/api/test_harness.py"

HUGGING_FACE = (
    # ---- tensors ----
    Break(
        "halves of a head are not made pairs",
        "jaxptd/hf/families/llama.py",
        '"blocks.attention.q.w", "L D N (P 2)"',
        '"blocks.attention.q.w", "L D N (2 P)"',
        "tests/hf",
    ),
    Break(
        "each device reads the first layers",
        "jaxptd/hf/read.py",
        "yield layer, (layer - first, *place[1:])",
        "yield layer - first, (layer - first, *place[1:])",
        "tests/hf/test_read.py",
    ),
    Break(
        "tensors are exported as they are saved",
        "jaxptd/hf/write.py",
        "yield each, tensor.astype(kind)",
        "yield each, tensor",
        "tests/hf/test_convert.py",
    ),
    Break(
        "an export has the keys of our sizes only",
        "jaxptd/hf/sizes.py",
        "    if _says(found, model):",
        "    if not model:",
        "tests/hf/test_base.py",
    ),
    Break(
        "a run with another tokenizer is exported with the ids of its base",
        "jaxptd/hf/base.py",
        "if ours.get(TOKENIZER) == theirs.get(TOKENIZER):",
        "if theirs:",
        "tests/hf/test_base.py",
    ),
    Break(
        "queries and keys of an encoder are exchanged",
        "jaxptd/hf/families/bert.py",
        '[0] N H", f"{_HEADS}.query.weight", "(N H) D"),\n'
        '        Rule("blocks.attention.qkv.w", "L D [1]',
        '[1] N H", f"{_HEADS}.query.weight", "(N H) D"),\n'
        '        Rule("blocks.attention.qkv.w", "L D [0]',
        "tests/hf/test_encoders.py",
        "bert",
    ),
    Break(
        "an encoder's first norm of sums is its second",
        "jaxptd/hf/families/bert.py",
        'Rule("blocks.mlp_norm.w", "L D", f"{_LAYER}.output.LayerNorm.weight", "D")',
        'Rule("blocks.mlp_norm.w", "L D", f"{_OUT}.LayerNorm.weight", "D")',
        "tests/hf/test_encoders.py",
    ),
    Break(
        "a square matrix is not transposed",
        "jaxptd/hf/families/bert.py",
        '"D E", f"{_MLM}.transform.dense.weight", "E D"',
        '"D E", f"{_MLM}.transform.dense.weight", "D E"',
        "tests/hf/test_encoders.py",
    ),
    Break(
        "T5's gate is what it multiplies",
        "jaxptd/hf/families/t5.py",
        '[0] F", f"{dense}.wi_0.weight", "F D"),  # the gate\n'
        '        Rule(f"{name}.mlp.up.w", "L D [1]',
        '[1] F", f"{dense}.wi_0.weight", "F D"),\n        Rule(f"{name}.mlp.up.w", "L D [0]',
        "tests/hf/test_rules.py",
    ),
    Break(
        "the source's last norm is the targets'",
        "jaxptd/hf/families/t5.py",
        '"common.source_norm.w", "D", "encoder.final_layer_norm.weight"',
        '"common.source_norm.w", "D", "decoder.final_layer_norm.weight"',
        "tests/hf/test_encoders.py",
        "t5",
    ),
    Break(
        "rules of a matrix without a gate are those of one with it",
        "jaxptd/hf/mapping.py",
        "if (rule.ours, rule.rank) == (name, len(shape))",
        "if rule.ours == name",
        "tests/hf/test_rules.py",
    ),
    # ---- copies ----
    Break(
        "the first rows of copies are compared",
        "jaxptd/hf/directory.py",
        "for begin in range(0, first, rows):",
        "for begin in range(1):",
        BERT,
    ),
    Break(
        "a copy is used unseen",
        "jaxptd/hf/read.py",
        "if not directory.are_equal(copy, name):",
        "if directory.shapes[copy] != directory.shapes[name]:",
        BERT,
    ),
    Break(
        "a copy of the embedding is a table of its own",
        "jaxptd/hf/read.py",
        "return directory.are_equal(head, tokens)",
        "return False",
        DIRECTORIES,
    ),
    Break(
        "a NaN of a file is trained",
        "jaxptd/hf/read.py",
        "if not np.isfinite(found[place]).all():",
        "if not found.size:",
        "tests/hf/test_start.py",
    ),
    # ---- config.json ----
    Break(
        "rope_parameters go before rope_scaling",
        "jaxptd/hf/rope.py",
        "(config.get(SCALING) or config.get(PARAMETERS) or {})",
        "(config.get(PARAMETERS) or config.get(SCALING) or {})",
        "tests/hf/test_rope.py",
    ),
    Break(
        "Qwen's window in all layers",
        "jaxptd/hf/window.py",
        "max(layers - max(first, 0), 0)",
        "layers",
        "tests/hf/test_window.py",
    ),
    Break(
        "Mistral's default is no window",
        "jaxptd/hf/window.py",
        '_checked(config.get("sliding_window", DEFAULT)), _layer_types',
        '_checked(config.get("sliding_window")), _layer_types',
        "tests/hf/test_window.py",
    ),
    Break(
        "the factor of T5's output goes by the tied table alone",
        "jaxptd/hf/families/t5.py",
        'config.get(_SCALED, config.get("tie_word_embeddings") is not False)',
        'config.get("tie_word_embeddings") is not False',
        T5,
    ),
    Break(
        "another padding than the start is read as the start",
        "jaxptd/hf/families/t5.py",
        "if pad != start:",
        "if pad is None:",
        T5,
    ),
    Break(
        "patches that Swin joins change rows for columns",
        "jaxptd/hf/families/swin.py",
        '"D (2y 2x) E", f"{down}',
        '"D (2x 2y) E", f"{down}',
        "tests/hf/families/test_swin.py",
        "transformers",
    ),
    Break(
        "both blocks of a pair of Swin are read from the first",
        "jaxptd/hf/families/swin.py",
        "first=first, step=len(BLOCKS)",
        "first=0, step=len(BLOCKS)",
        "tests/hf/families/test_swin.py",
    ),
    Break(
        "the way up of Swin-Unet has the names of the way down",
        "jaxptd/hf/families/swin_unet.py",
        "found += _up(level, levels - 1 - level)",
        "found += _up(level, 1 + level)",
        "tests/hf/families/test_swin_unet.py",
    ),
    Break(
        "patches that Swin-Unet parts have columns before rows",
        "jaxptd/hf/families/swin_unet.py",
        'f"D E ({parts})", name,',
        'f"D E ({side}x {side}y)", name,',
        "tests/models/test_swin_unet_of_torch.py",
    ),
    Break(
        "a limit of the logits is lost in an export",
        "jaxptd/hf/sizes.py",
        ', "logit_softcap": None}',
        "}",
        "tests/hf/test_window.py",
    ),
)

SCORES = (
    Break(
        "targets at the beginning of a text",
        "jaxptd/api/scoring.py",
        "row[1, len(text) - 1 - len(continuation) : len(text) - 1] = continuation",
        "row[1, : len(continuation)] = continuation",
        SCORES_TEST,
        "log_softmax",
    ),
    Break(
        "a replica's scores for all texts",
        "jaxptd/api/scoring.py",
        "all_gather(x, Axis.DP, 0)",
        "x",
        SCORES_TEST,
        "log_softmax",
    ),
    Break(
        "a window without the token before it",
        "jaxptd/api/scoring.py",
        "known[start : first + 1]",
        "known[start:first]",
        SCORES_TEST,
        "windows",
    ),
    Break(
        "greedy if one token is the likeliest",
        "jaxptd/api/scoring.py",
        "== target_BT)).all(1)",
        "== target_BT)).any(1)",
        SCORES_TEST,
        "likeliest",
    ),
    Break(
        "the rest of a prompt is drawn",
        "jaxptd/run/generator.py",
        "jnp.where(given_N[i] == NONE, drawn_B, given_N[i])",
        "drawn_B",
        HARNESS_TEST,
        "stop",
    ),
    Break(
        "a generation ends at its last stop",
        "jaxptd/data/tokenizers.py",
        "return text[: min(found, default=len(text))]",
        "return text[: max(found, default=len(text))]",
        "tests/data/test_tokenizers.py",
        "stop",
    ),
    Break(
        "documents begin without the tokenizer's begin",
        "jaxptd/data/corpora.py",
        "return np.concatenate([begin, ids, end])",
        "return np.concatenate([ids, end])",
        "tests/data/test_special_tokens.py",
    ),
    Break(
        "a continuation is decoded without its prompt",
        "jaxptd/data/tokenizers.py",
        "whole[len(complete) :] if whole.startswith(complete) else tokenizer.decode(ids)",
        "tokenizer.decode(ids)",
        "tests/data/test_tokenizers.py",
        "continuation",
    ),
    Break(
        "spaces before a continuation are the context's",
        "jaxptd/api/harness.py",
        "stripped = context.rstrip()",
        "stripped = context",
        HARNESS_TEST,
        "likelihoods",
    ),
)
