"""Generates text with a trained model and a cache of keys and values, or masks of images.

`python -m jaxptd.generate --run-dir runs/quickstart --prompt "def " --tokens 200` loads the newest
good checkpoint of a run. Text that fills the model's seq_length is continued from its last half.
An encoder-decoder answers the prompt instead. An image model writes the classes of pixels as PNG
files, each with an overlay, or prints the classes of whole images.
"""

import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from jaxptd.commands.command_line import load_config
from jaxptd.common_options import add_words, path_option, place_option
from jaxptd.data.tokenizers import (
    Tokenizer,
    continuation,
    pieces,
    spelling,
    until_stop,
    with_begin,
)
from jaxptd.display import callable_module
from jaxptd.errors import Parser, UserError, quoted, run_command
from jaxptd.fields import checked
from jaxptd.hf.load import load_model
from jaxptd.mesh import Layout
from jaxptd.models.families import family_of, tokenizer_of
from jaxptd.models.family import Writing
from jaxptd.params import Params
from jaxptd.run.generator import Generator
from jaxptd.run.progress import printable
from jaxptd.run.sampling import Sampling
from jaxptd.run.speculative import Drafts
from jaxptd.step import Program
from jaxptd.stores import Place, StorePath, place
from jaxptd.vision.masks import held_out_inputs, inputs_of, write_classes

__all__ = ["Generator", "Sampling", "Writer", "check_tokens", "generate", "main", "parser"]

MOST_TOKENS, DEFAULT_TOKENS = 1_000_000, 200  # per text
MOST_IMAGES, DEFAULT_IMAGES = 10_000, 8
# Options that apply only to text, and only to images.
OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
OF_TEXT = ("prompt", "prompts", "tokens", *OF_SAMPLING, "stop", "speculative")
OF_IMAGES = ("images", "samples", "out")
AXES = ("tp", "pp", "row", "col", "cp", "ep")  # devices along cp and ep generate the same text


@dataclasses.dataclass(frozen=True)
class Writer:
    """Writes texts with a program's model; programs are compiled once for all of them.

    A text ends before the first end token or the first of the texts in `stop`. A model that
    continues its prompt starts a new document after an empty one. An encoder-decoder answers
    instead, and its prompt may name special tokens such as <extra_id_0>.

    Args:
        program: has the model.
        params: of the model.
        tokenizer: of the model.
        sampling: how tokens are drawn.
        stop: further texts before which a text ends.
        drafts: counts those of MTP modules. None: they make none.
    """

    program: Program
    params: Params
    tokenizer: Tokenizer
    sampling: Sampling
    stop: Sequence[str] = ()
    drafts: Drafts | None = None

    @cached_property
    def _writing(self) -> Writing:
        family = family_of(self.program.config.model)
        if family.writing is None:
            name = self.program.config.model.family
            raise UserError(
                f"model.family={name} does not write text; use a decoder such as gpt or llama"
            )
        return family.writing

    @cached_property
    def _generator(self) -> Generator:
        vocab_size = min(self.tokenizer.vocab_size, self.program.config.model.vocab_size or 0)
        return Generator(self.program, vocab_size, self.sampling, self.tokenizer.ends, self.drafts)

    def __call__(self, prompt: str, tokens: int, *, many: bool = False) -> str:
        """The prompt and the text that the model adds; of an encoder-decoder the answer alone.

        Args:
            prompt: text that the model reads.
            tokens: to write at most.
            many: prompts of similar lengths share compiled programs; for many prompts.

        Raises:
            UserError: the model does not write text, its vocabulary lacks an id of the prompt, or
                the prompt is too long; or with drafts, the model has no MTP modules.
        """
        ids, write = self._ids(prompt), self._generator
        fits = len(ids) + tokens <= self.program.config.model.seq_length
        shares = many and self._writing.continues and fits and self.drafts is None
        found = (write.generate_many if shares else write)(self.params, ids, tokens)
        return self._begins(prompt) + until_stop(self._decoder(ids)(found), self.stop)

    def stream(self, prompt: str, tokens: int, *, with_prompt: bool = True) -> Iterator[str]:
        """The text of a call in pieces: the prompt, and the rest as it is generated.

        Characters and stops are never split between pieces, and the model stops at a stop. Without
        `with_prompt` there is only what the model adds.

        Raises:
            UserError: as a call, before the first piece.
        """
        ids = self._ids(prompt)
        chunks = self._generator.stream(self.params, ids, tokens)
        written = pieces(chunks, self._decoder(ids), self.stop)
        begins = self._begins(prompt) if with_prompt else ""
        return itertools.chain([begins] if begins else [], written)

    def _ids(self, prompt: str) -> list[int]:
        """The ids that the model reads first."""
        tokenizer, vocab_size = self.tokenizer, self._generator.vocab_size
        ids = with_begin(tokenizer, _ids(prompt, tokenizer, self._special))
        ids += [] if self._writing.continues and ids else [tokenizer.end_of_document]
        if max(ids) >= vocab_size:
            raise UserError(
                f"the prompt {quoted(repr(prompt))} has id {max(ids)}, but the model knows only 0 "
                f"to {vocab_size - 1}; leave {spelling(tokenizer, max(ids))} out of it, or "
                "use the tokenizer that the model was trained with"
            )
        return ids

    def _begins(self, prompt: str) -> str:
        """The beginning of a text: the prompt, if the model continues it."""
        return prompt if self._writing.continues else ""

    def _decoder(self, ids: Sequence[int]) -> Callable[[Sequence[int]], str]:
        """Makes the function from the ids that follow a prompt's to their text."""
        tokenizer = self.tokenizer
        return (
            partial(continuation, tokenizer, ids) if self._writing.continues else tokenizer.decode
        )

    @property
    def _special(self) -> Sequence[str]:
        return family_of(self.program.config.model).special


def _ids(prompt: str, tokenizer: Tokenizer, special: Sequence[str]) -> list[int]:
    """The ids of a prompt that may name special tokens."""
    names = {name: tokenizer.token_id(name) for name in special if name in prompt}
    ids: list[int] = []
    for piece in re.split(f"({'|'.join(map(re.escape, names))})", prompt) if names else [prompt]:
        number = names.get(piece)
        ids += tokenizer.encode(piece).tolist() if number is None else [number]
    return ids


def check_tokens(name: str, tokens: int) -> None:
    """Raises UserError for a negative or absurdly large number of tokens."""
    if not 0 <= tokens <= MOST_TOKENS:
        raise UserError(f"{name} {tokens}: use 0 to {MOST_TOKENS} tokens")


@checked("jaxptd.generate")
def generate(
    run_dir: str | Place,
    prompt: str = "",
    *,
    tokens: int = 200,
    temperature: float = Sampling.temperature,
    top_k: int = Sampling.top_k,
    top_p: float = Sampling.top_p,
    min_p: float = Sampling.min_p,
    repetition_penalty: float = Sampling.repetition_penalty,
    seed: int = 0,
    tp: int = 1,
    stop: Sequence[str] = (),
    speculative: bool = False,
    layout: Layout | None = None,
    platform: Literal["auto", "cpu"] = "auto",
) -> str:
    """Generates text with a run's model: the prompt and its continuation, or an answer.

    The text ends at any of the model's end tokens: all of `eos_token_id` of a Hugging Face
    directory.

    `jaxptd.load(run_dir)` restores a model once for several texts.

    >>> print(generate("runs/quickstart", "def ", tokens=100))  # doctest: +SKIP

    Args:
        run_dir: directory of a run, or a Hugging Face model directory.
        prompt: text to continue; empty starts a document.
        tokens: number of tokens to generate.
        temperature: sampling temperature; 0 takes the most likely token.
        top_k: draw from the k most likely tokens; 0 from all.
        top_p: draw from the most likely tokens that together have this probability.
        min_p: draw from tokens with this share of the most likely one's probability.
        repetition_penalty: above 1, tokens that the text has already are less likely.
        seed: seed for sampling.
        tp: number of devices to split the model over.
        stop: strings that also end the text; they are left out.
        speculative: whether the modules of `model.mtp` draft tokens that the model checks, several
            in one pass; the text is the same.
        layout: layout with other axes than tp.
        platform: as `train.platform`.

    Raises:
        UserError: there is no run, no good checkpoint, or too few devices.
    """
    check_tokens("tokens", tokens)
    sampling = Sampling(temperature, top_k, seed, top_p, min_p, repetition_penalty)
    layout = layout or Layout(tp=tp)
    program, params = load_model(
        place(run_dir), layout=layout, platform=platform, modules=speculative
    )
    drafts = Drafts() if speculative else None
    tokenizer = tokenizer_of(program.config)
    return Writer(program, params, tokenizer, sampling, stop, drafts)(prompt, tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Generates text with the model of a run, or segments or classifies images."""
    args = parser().parse_args(argv)
    check_options(args)
    layout = Layout(**{axis: getattr(args, axis) for axis in AXES})
    program, params = load_model(
        _run_dir(args), layout=layout, platform=args.platform, modules=bool(args.speculative)
    )
    family = family_of(program.config.model)
    unused, words = (OF_TEXT, "text") if family.classes else (OF_IMAGES, "images")
    if given := [name for name in unused if getattr(args, name) is not None]:
        raise UserError(
            f"--{given[0].replace('_', '-')} is an option for {words}, but the model has "
            f"model.family={program.config.model.family}; leave it out"
        )
    for line in (_classes if family.classes else _text)(args, program, params):
        print(line, flush=True)
    return 0


def check_options(args: Any) -> None:
    """Raises UserError for numbers that no model accepts, before a model is loaded."""
    if args.tokens is not None and not 1 <= args.tokens <= MOST_TOKENS:
        raise UserError(f"--tokens {args.tokens}: use 1 to {MOST_TOKENS} tokens")
    if args.samples is not None and not 1 <= args.samples <= MOST_IMAGES:
        raise UserError(f"--samples {args.samples}: use 1 to {MOST_IMAGES} images")
    if args.samples is not None and args.images:
        raise UserError("--samples (held-out images) and --images are both given; use one")
    if args.prompts is not None:
        if args.prompt is not None:
            raise UserError("--prompt and --prompts are both given; use one")
        args.prompts = read_prompts(args.prompts)
    _sampling(args)


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file: its lines, or the fields `prompt` of JSON lines in a `.jsonl`.

    Raises:
        UserError: it cannot be read, or a line is not such an object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"--prompts {path}: {reason}; name a text file of prompts") from error
    if not lines:
        raise UserError(f"--prompts {path}: it is empty; write a prompt on each line")
    if path.suffix != ".jsonl":
        return lines
    return [_prompt_of(line, f"--prompts {path}, line {i}") for i, line in enumerate(lines, 1)]


def _prompt_of(line: str, where: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        prompt = None
    if not isinstance(prompt, str):
        raise UserError(f'{where}: use an object such as {{"prompt": "def "}}')
    return prompt


def _sampling(args: Any) -> Sampling:
    return Sampling(**{n: getattr(args, n) for n in OF_SAMPLING if getattr(args, n) is not None})


def _text(args: Any, program: Program, params: Params) -> Iterator[str]:
    """Yields what the command prints for text."""
    prompt, tokens = args.prompt or "", args.tokens or DEFAULT_TOKENS
    drafts = Drafts() if args.speculative else None
    tokenizer = tokenizer_of(program.config)
    write = Writer(program, params, tokenizer, _sampling(args), args.stop or (), drafts)
    if args.prompts is not None:
        for each in args.prompts:
            yield json.dumps({"prompt": each, "text": write(each, tokens, many=True)})
        return
    if not (drafts or args.json) and sys.stdout.isatty():
        for piece in write.stream(prompt, tokens, with_prompt=not args.quiet):
            print(printable(piece, sys.stdout.encoding), end="", flush=True)
        yield ""  # ends the last line
        return
    text = write(prompt, tokens)
    if args.json:
        counts = {"drafts": dataclasses.asdict(drafts)} if drafts else {}
        yield json.dumps({"prompt": prompt, "text": text} | counts)
        return
    text = text.removeprefix(prompt) if args.quiet else text
    yield printable(text, sys.stdout.encoding)
    if drafts and not args.quiet:
        print(drafts, file=sys.stderr)


def _classes(args: Any, program: Program, params: Params) -> Iterator[str]:
    """Yields what the command prints for images: mask files, or classes."""
    if args.images:
        images = inputs_of(program.config, args.images)
    else:
        images = held_out_inputs(program.config, args.samples or DEFAULT_IMAGES)
    folder = args.out or _run_dir(args) / "masks"
    if isinstance(folder, StorePath):
        raise UserError(f"--out is required: masks are written on a disk, not to {folder}")
    rows = write_classes(program, params, images, folder=folder)
    if args.json:
        yield json.dumps(rows)
    else:
        yield from (" ".join(str(x) for x in list(row.values())[args.quiet :]) for row in rows)


def parser() -> Parser:
    """Makes the parser of this command."""
    examples = (
        "jaxptd generate --run-dir runs/quickstart --prompt 'class '",
        "jaxptd generate --config quickstart --tokens 500 --temperature 0.5 --seed 1",
        "jaxptd generate --run-dir runs/swin-unet-shapes --images slices/ --out masks",
    )
    parser = Parser(prog="jaxptd generate", description=main.__doc__, examples=examples)
    add = parser.add_argument
    help_text = "directory or URL of a run, or a Hugging Face folder"
    add("--run-dir", type=place_option, metavar="D", help=help_text)
    add("--config", metavar="F", help="config of the run, instead of its directory")
    add("--prompt", help="text to continue; empty starts a document")
    help_text = "file with a prompt on each line, or of JSON lines"
    add("--prompts", type=path_option, metavar="F", help=help_text)
    add("--tokens", type=int, metavar="N", help=f"tokens to generate; default: {DEFAULT_TOKENS}")
    help_text = f"0 always takes the most likely token; default: {Sampling.temperature}"
    add("--temperature", type=float, metavar="X", help=help_text)
    help_text = f"only the k likeliest tokens, 0 for all; default: {Sampling.top_k}"
    add("--top-k", type=int, metavar="N", help=help_text)
    help_text = "only the likeliest, with X together; default: 1, all"
    add("--top-p", type=float, metavar="X", help=help_text)
    help_text = "only those with X of the likeliest's; default: 0"
    add("--min-p", type=float, metavar="X", help=help_text)
    help_text = "above 1, fewer repetitions; default: 1"
    add("--repetition-penalty", type=float, metavar="X", help=help_text)
    add("--seed", type=int, metavar="N", help=f"seed of the sampling; default: {Sampling.seed}")
    help_text = "end before this text as well; repeatable"
    add("--stop", action="append", metavar="TEXT", help=help_text)
    help_text = "modules of model.mtp draft tokens; the same text"
    add("--speculative", action="store_true", default=None, help=help_text)
    help_text = "image models: .npz, .npy, .png files or folders"
    add("--images", type=path_option, nargs="+", metavar="F", help=help_text)
    help_text = f"image models: held-out images; default: {DEFAULT_IMAGES}"
    add("--samples", type=int, metavar="N", help=help_text)
    help_text = "folder for masks; default: masks in the run's"
    add("--out", type=path_option, metavar="D", help=help_text)
    for axis in AXES:
        names = ("--tp", "--layout.tp") if axis == "tp" else (f"--layout.{axis}",)
        add(*names, dest=axis, type=int, default=1, metavar="N", help="devices; default: 1")
    help_text = "cpu simulates devices; default: auto"
    platforms = ("auto", "cpu")
    add("--platform", "--train.platform", choices=platforms, default="auto", help=help_text)
    quiet = "print only the generated text, or only the file names"
    add_words(parser, json="prompt and text, or images and files,", quiet=quiet)
    return parser


def _run_dir(args: Any) -> Place:
    """The directory that `--run-dir` or `--config` names."""
    if (args.run_dir is None) == (args.config is None):
        raise UserError("--run-dir is required: the directory of a run; or give its --config F")
    run_dir: Place = args.run_dir or place(load_config(args.config).train.run_dir)
    return run_dir


callable_module(__name__)
if __name__ == "__main__":
    run_command(main)
