"""The data of a run: from `data.source` to the sequences of step n. Needs numpy, not JAX.

`sources` (file names) -> `corpora` and `tokenizers` (text), or `token_files` (ids) -> `corpus` ->
`batches`, or `packing` for whole records, or `mixture` for several sources; then `objectives`,
except for next-token prediction. `jaxptd data` tokenizes text once into a file that later runs
memory-map.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxptd.data.batches import (
    NOT_COUNTED,
    VALIDATION,
    Derived,
    Field,
    Identity,
    Samples,
    ShuffledWindows,
    Windows,
    WindowsInOrder,
    document_starts,
    identity_of,
    number_documents,
)
from jaxptd.data.corpora import about_prompts
from jaxptd.data.corpus import Corpus, check_vocabulary, read_corpus, split_corpus
from jaxptd.data.mixture import Mixture, seed_of
from jaxptd.data.objectives import MaskedPairs, Objective, Prepared, SpanCorruption
from jaxptd.data.packing import WholeRecords, about_packing, lengths_of, require_fit
from jaxptd.data.pairs import Pairs
from jaxptd.data.sources import find_each, find_files
from jaxptd.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from jaxptd.errors import UserError
from jaxptd.fields import check_range, checked
from jaxptd.stores import Place

if TYPE_CHECKING:
    from jaxptd.config import DataConfig  # imports JAX

__all__ = [
    "NOT_COUNTED",
    "ByteTokenizer",
    "Data",
    "Derived",
    "Field",
    "MaskedPairs",
    "Mixture",
    "Objective",
    "Pairs",
    "Prepared",
    "Samples",
    "ShuffledWindows",
    "SpanCorruption",
    "Tokenizer",
    "WholeRecords",
    "Windows",
    "WindowsInOrder",
    "document_starts",
    "load_tokenizer",
    "number_documents",
    "open_data",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Data:
    """The two splits of a corpus, or of each source of a mixture.

    Args:
        train: the beginning of the corpus, in random order.
        validation: the end of the corpus, in order; None if `data.validation_fraction` is 0.
        remarks: what a user should know about how the text was read, one line each.
        identity: distinguishes this data from other data, see `batches.py`. Empty for images.
        sets: those of `data.validation`, whole and in order, by name.
    """

    train: Samples
    validation: Samples | None
    remarks: tuple[str, ...] = ()
    identity: Identity = dataclasses.field(default_factory=dict)
    sets: Mapping[str, Samples] = dataclasses.field(default_factory=dict)

    @property
    def evaluated(self) -> dict[str, Samples]:
        """All that an evaluation reads, by name; the held-out part of the corpus is ""."""
        return ({"": self.validation} if self.validation else {}) | dict(self.sets)


@checked("jaxptd.open_data")
def open_data(
    config: "DataConfig",
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    vocab_size: int,
    seed: int,
    objective: Objective | None = None,
) -> Data:
    """Opens the data of a run.

    >>> from jaxptd import DataConfig
    >>> config, sizes = DataConfig(source=__file__), {"seq_length": 16, "vocab_size": 257}
    >>> open_data(config, load_tokenizer("bytes"), **sizes, seed=0).train.rows([0, 1]).shape
    (2, 17)

    Text is read and tokenized here, with an end of document after each document. `.bin` files are
    memory-mapped and their ids used unchanged, whatever `tokenizer` is.

    Args:
        config: names the sources.
        tokenizer: for text.
        seq_length: tokens in a sequence; an objective uses its `window` instead.
        vocab_size: upper bound of the ids.
        seed: of the training order.
        objective: makes the fields of a batch; both splits are then `Prepared`. None predicts the
            next token.

    Raises:
        UserError: a source is missing or broken, text and token files are mixed, the tokenizer or
            an id does not fit `vocab_size`, the tokenizer cannot tell documents apart, a split is
            shorter than one sequence or holds only prompts, a document that stays whole is longer
            than one, a chat is broken or its template refuses it, or the objective does not support
            prompts, chats or separate documents.
    """
    for name, value in (("seq_length", seq_length), ("vocab_size", vocab_size)):
        check_range("jaxptd.open_data", name, value, least=1)
    check_range("jaxptd.open_data", "seed", seed, least=0)
    if config.augment:
        raise UserError("data.augment=true is for images, but this is text; leave it out")
    if objective is None:
        data = _open_all(config, tokenizer, (seq_length, vocab_size), seed)
        return dataclasses.replace(data, remarks=(*data.remarks, *_about_prompts(config)))
    _check_objective(objective, config, vocab_size)
    config = dataclasses.replace(config, special_tokens="parse")  # no remark may suggest otherwise
    data = _open_all(config, tokenizer, (objective.window, vocab_size), seed)
    return Data(
        train=Prepared(data.train, objective, seed),
        validation=data.validation and Prepared(data.validation, objective, seed=0),
        remarks=data.remarks,
        identity=data.identity,
        sets={name: Prepared(each, objective, seed=0) for name, each in data.sets.items()},
    )


def _about_prompts(config: "DataConfig") -> Iterator[str]:
    """Warns of prompts that records have and nothing reads; looks at the first file of a source."""
    if config.prompt_field is None and not config.has_chats:
        names = [config.source] if isinstance(config.source, str) else list(config.source)
        firsts = [files[0] for files in find_each(names).values()]
        yield from about_prompts(firsts, config.text_field)


def _check_objective(objective: Objective, config: "DataConfig", vocab_size: int) -> None:
    """Raises UserError for too few ids, or for settings that need next-token prediction."""
    check_vocabulary(objective.vocab_size, vocab_size)
    for name, value in (
        ("prompt_field", None),
        ("rejected_field", None),
        ("messages_field", None),
        ("format", "auto"),
        ("too_long", "split"),
        ("documents", "joined"),
    ):
        if (given := getattr(config, name)) != value:
            raise UserError(
                f"data.{name}={given!r}: this model does not predict the next token; use "
                f"data.{name}={value or 'null'}"
            )


def _open_all(
    config: "DataConfig", tokenizer: Tokenizer, sizes: tuple[int, int], seed: int
) -> Data:
    """Opens the sources and the sets of `data.validation`; sizes are seq_length and vocab_size."""
    data = _open_sources(config, tokenizer, sizes, seed)
    sets, remarks, identity = {}, [*data.remarks], {**data.identity}
    trained = [config.source] if isinstance(config.source, str) else [*config.source]
    for name, source in (config.validation or {}).items():
        with _naming_set(name):
            named = [source] if isinstance(source, str) else source
            find_each([*trained, *named])  # no file may be in both
            corpus = _read(find_files(named), config, tokenizer, sizes)
            sets[name] = _samples(corpus, config, sizes)
        remarks += corpus.remarks
        identity[f"{VALIDATION}.{name}"] = _identity(corpus, config)
    return dataclasses.replace(
        data, sets=sets, remarks=tuple(dict.fromkeys(remarks)), identity=identity
    )


@contextlib.contextmanager
def _naming_set(name: str) -> Iterator[None]:
    """Names the set in errors about its files, which speak of a source."""
    field = f"{VALIDATION}.{name}"
    try:
        yield
    except UserError as error:
        text = str(error)
        own = text.startswith("data.source")
        text = text.replace("data.source", field, 1) if own else f"{field}: {text}"
        raise UserError(text) from error


def _open_sources(
    config: "DataConfig", tokenizer: Tokenizer, sizes: tuple[int, int], seed: int
) -> Data:
    """Opens the windows of one source or of a mixture; sizes are seq_length and vocab_size."""
    make = partial(_open, config, tokenizer, sizes)
    if not isinstance(config.source, dict):
        data = make(find_files(config.source), seed=seed)
        return dataclasses.replace(data, remarks=(*data.remarks, *about_packing({"": data.train})))
    parts = []
    for number, (name, files) in enumerate(find_each(config.source).items()):
        with _naming(name):
            parts.append(make(files, seed=seed_of(seed, number)))
    mix = partial(Mixture, weights=tuple(config.source.values()), seq_length=sizes[0])
    held_out = tuple(part.validation for part in parts if part.validation)
    remarks = [remark for part in parts for remark in part.remarks]
    if config.has_chats or config.too_long != "split":  # these remarks count
        named = zip(config.source, parts, strict=True)
        remarks = [f"{name}: {remark}" for name, part in named for remark in part.remarks]
    packed = {name: part.train for name, part in zip(config.source, parts, strict=True)}
    return Data(
        train=mix(tuple(part.train for part in parts), seed=seed),
        validation=mix(held_out, seed=0) if held_out else None,
        remarks=(*dict.fromkeys(remarks), *about_packing(packed)),
        identity={name: part.identity[""] for name, part in zip(config.source, parts, strict=True)},
    )


def _open(
    config: "DataConfig",
    tokenizer: Tokenizer,
    sizes: tuple[int, int],
    files: Sequence[Place],
    *,
    seed: int,
) -> Data:
    """Opens the files of one source; sizes are seq_length and vocab_size."""
    corpus, whole = _read(files, config, tokenizer, sizes), config.documents == "whole"
    train, end = split_corpus(corpus, config.validation_fraction, seq_length=sizes[0], whole=whole)
    return Data(
        train=_samples(train, config, sizes, seed=seed),
        validation=_samples(end, config, sizes) if end else None,
        remarks=corpus.remarks,
        identity={"": _identity(corpus, config)},
    )


def _read(
    files: Sequence[Place], config: "DataConfig", tokenizer: Tokenizer, sizes: tuple[int, int]
) -> Corpus:
    """Reads files; sizes are seq_length and vocab_size."""
    corpus = read_corpus(files, config, tokenizer, seq_length=sizes[0], vocab_size=sizes[1])
    if config.documents == "whole":
        assert corpus.ends is not None
        drop = {} if corpus.middles is None else {"otherwise": "or data.too_long=drop"}
        require_fit(lengths_of(corpus.ends), sizes[0], **drop)
    return corpus


def _identity(corpus: Corpus, config: "DataConfig") -> dict[str, Any]:
    by_record = config.has_chats or config.rejected_field is not None
    masks = (corpus.ends, corpus.counted if by_record else None)
    return identity_of(corpus.tokens, *masks)


def _samples(
    corpus: Corpus, config: "DataConfig", sizes: tuple[int, int], seed: int | None = None
) -> Samples:
    """The sequences of a corpus.

    Args:
        corpus: of a split, or of a set.
        config: says whether documents stay whole.
        sizes: seq_length and vocab_size.
        seed: of the training order. None: in order, for evaluation.
    """
    options: dict[str, Any] = {"seq_length": sizes[0], "vocab_size": sizes[1]}
    options["counted"] = corpus.counted
    if config.documents == "whole":
        assert corpus.ends is not None
        if corpus.middles is not None:
            options["middles"] = corpus.middles
            return Pairs(corpus.tokens, corpus.ends, seed=seed, **options)
        return WholeRecords(corpus.tokens, corpus.ends, seed=seed, **options)
    options["ends"] = corpus.ends
    if seed is None:
        return WindowsInOrder(corpus.tokens, **options)
    return ShuffledWindows(corpus.tokens, seed=seed, **options)


@contextlib.contextmanager
def _naming(source: str) -> Iterator[None]:
    """Adds the source's name to errors about one source of a mixture."""
    try:
        yield
    except UserError as error:
        raise UserError(f"data.source, {source!r}: {error}") from error
