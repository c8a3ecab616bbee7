"""The options of `jaxptd train`; imports no jax, because `jaxptd launch` reads them first."""

import functools

from jaxptd.commands.command_line import ConfigParser
from jaxptd.commands.run_options import USUAL, run_parser
from jaxptd.common_options import add_words

RUN = (
    *("--data.source", "--data.tokenizer", "--data.special_tokens", "--data.prompt_field"),
    "--data.messages_field",
    *("--optimizer.learning_rate", "--optimizer.warmup_steps", "--train.steps"),
    "--checkpoint.every",
)


@functools.cache
def parser() -> ConfigParser:
    """Makes the parser of this command."""
    examples = (
        "--config quickstart",
        "--config gpt2-124m --data.source data/train.bin --layout.dp 4 --layout.tp 2",
        "--from models/llama --data.source texts.jsonl --run-dir runs/tuned     (fine-tunes)",
        "--run-dir runs/quickstart --train.steps 2400     (resumes a run, on any layout)",
    )
    about = "Trains a model on a mesh of devices, or resumes the run in its directory."
    parser = run_parser("train", about, examples=examples, usual=(*USUAL, *RUN))
    quiet = "print only warnings; metrics.jsonl has the numbers"
    add_words(parser, json="rows of metrics and messages, one per line,", quiet=quiet)
    return parser
