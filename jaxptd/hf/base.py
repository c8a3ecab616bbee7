"""The small files of the Hugging Face model that a run started from, for its exports.

A run keeps copies in its own directory from the start, so that it can be exported even after the
model's directory has gone:

    RUN/base/config.json, generation_config.json, tokenizer.json, chat_template.jinja, ...

If the run's tokenizer differs from its base's, the files and the ids of special tokens in the two
configs are those of the run's tokenizer.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from jaxptd.atomic_files import explained, shown
from jaxptd.config import Config, DataConfig
from jaxptd.config.training import RANDOM
from jaxptd.data import tokenizers
from jaxptd.data.tokenizer_folders import (
    FIELD,
    GENERATION,
    NAMED,
    SETTINGS,
    TEMPLATE,
    TOKENIZER,
    settings,
)
from jaxptd.data.tokenizers import BYTES, Tokenizer
from jaxptd.distributed.coordination import first_only
from jaxptd.errors import read_small
from jaxptd.hf.directory import CONFIG, is_directory, read_json
from jaxptd.hf.families import Json
from jaxptd.hf.sizes import token_ids
from jaxptd.models.families import family_of, tokenizer_of
from jaxptd.run.folder import BASE, RunDir, run_dir_errors
from jaxptd.stores import Place, StorePath, local_copy, on_disk, place

LARGEST = 64 * 2**20  # bytes; twice the size of the largest tokenizers
OF_TOKENIZER = (
    *(TOKENIZER, SETTINGS, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *(TEMPLATE, "chat_template.json", "additional_chat_templates/*.jinja"),
)
OF_IMAGES = ("preprocessor_config.json", "processor_config.json")
# Keys of a config, besides `..._token_id`, whose values are token ids.
_IDS = frozenset({"suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids"})
_IDS |= {"forced_decoder_ids", "sequence_bias", "exponential_decay_length_penalty"}
_OF_MODEL = frozenset({"decoder_start_token_id"})  # which reads it, whatever texts have

Files = dict[str, bytes]


def tokenizer_files(data: DataConfig, *, say: Callable[[str], None] = lambda line: None) -> Files:
    """The files of a run's tokenizer (a file or a folder) with its chat template; none for bytes.

    `data.chat_template` takes the place of the tokenizer's own templates.
    """
    path, files = tokenizers.on_disk(data.tokenizer), Files()
    if path.is_dir():
        files = _small(path, OF_TOKENIZER, say)
    elif path.is_file() and data.tokenizer != BYTES:
        files = {TOKENIZER: path.read_bytes()}
    if data.chat_template is None:
        return files
    own = on_disk(place(data.chat_template, field="data.chat_template"))
    text = read_small(own, remedy="put the file there", what="data.chat_template")
    return _without_templates(files) | {TEMPLATE: text.encode()}


def _without_templates(files: Files) -> Files:
    return {name: data for name, data in files.items() if "chat_template" not in name}


@first_only
def keep_base(
    run_dir: RunDir, config: Config, *, say: Callable[[str], None], anew: bool = False
) -> None:
    """Writes the files of a run's base into its directory, unless they exist.

    Args:
        run_dir: the run's directory.
        config: of the run. Its `checkpoint.start` names the base, or a run that has one.
        say: prints a line about a file that is too large to keep.
        anew: the run is new, so existing files belong to another run.

    Raises:
        UserError: a file cannot be read or written.
    """
    kept, aside = run_dir.path / BASE, run_dir.path / f".{BASE}.partial"
    if kept.exists() and not anew:
        return
    source = _source(config)
    files = _files_of(source, config, say) if source else {}
    with run_dir_errors(run_dir.path):
        for old in (aside, kept):
            shutil.rmtree(old, ignore_errors=True)
        if files:
            write_files(aside, files)
            os.replace(aside, kept)


def base_of(run_dir: Place, config: Config) -> Files | None:
    """The files of a run's base: those it has kept, else the base's own; None without a base.

    Raises:
        UserError: a file cannot be read.
    """
    kept = run_dir / BASE
    if is_directory(kept):
        folder = local_copy(kept) if isinstance(kept, StorePath) else kept
        return _small(folder, (CONFIG, GENERATION, *OF_TOKENIZER, *OF_IMAGES))
    source = _source(config)
    return _files_of(source, config) if source else None


def write_files(folder: Path, files: Files) -> None:
    """Makes a folder with these files. Raises OSError."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


def _source(config: Config) -> Path | None:
    """The directory of a run's base: where it starts from, or what that run or checkpoint kept."""
    if config.checkpoint.start in (None, RANDOM):
        return None
    start = place(str(config.checkpoint.start))
    places = [start, start / BASE, start.parent.parent / BASE]
    found = next((each for each in places if is_directory(each)), None)
    return local_copy(found) if isinstance(found, StorePath) else found


def _files_of(
    source: Path, config: Config, say: Callable[[str], None] = lambda line: None
) -> Files:
    """The files of a base as a run has them."""
    configs = _small(source, (CONFIG, GENERATION, *OF_IMAGES), say)
    theirs = _small(source, OF_TOKENIZER, say)
    if not family_of(config.model).has_vocabulary:
        return configs | theirs
    ours = tokenizer_files(config.data, say=say)
    if ours.get(TOKENIZER) == theirs.get(TOKENIZER):
        if config.data.chat_template is not None:
            theirs = _without_templates(theirs)
        return configs | theirs | ours
    ids = _ids(config, tokenizer_of(config))
    for name in {CONFIG, GENERATION} & set(configs):
        configs[name] = as_json(_with_ids(read_json(source / name), ids))
    return configs | ours


def _ids(config: Config, tokenizer: Tokenizer) -> Json:
    """The ids of special tokens of a run's own tokenizer, by the keys of a config."""
    folder = str(tokenizers.on_disk(config.data.tokenizer))
    ids = token_ids(config.model, tokenizer)
    for name, token in (settings(folder) if os.path.isdir(folder) else {}).items():
        spelling = token.get("content") if isinstance(token, dict) else token
        key = f"{name}_id"
        if name in NAMED and key != FIELD and isinstance(spelling, str):
            ids[key] = tokenizer.token_id(spelling)
    return ids


def _with_ids(config: Json, ids: Json) -> Json:
    """A base's config with another tokenizer's ids."""
    replaced = {key for key in config if key.endswith("_token_id")} - _OF_MODEL | _IDS
    return {key: value for key, value in config.items() if key not in replaced} | ids


def as_json(content: Json) -> bytes:
    """A config's text."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _small(
    folder: Path, names: Iterable[str], say: Callable[[str], None] = lambda line: None
) -> Files:
    """The content of the folder's files that exist, by their path in it."""
    files: Files = {}
    for path in (path for name in names for path in sorted(folder.glob(name))):
        with explained(shown(path), "make it readable, or remove it"):
            if not path.is_file():
                continue
            if (size := path.stat().st_size) > LARGEST:
                say(f"warning: {path} has {size} bytes; exports keep files of at most {LARGEST}")
                continue
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files
