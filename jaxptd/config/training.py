"""The sections `data`, `optimizer`, `train` and `checkpoint` of a config."""

import dataclasses
import datetime
import fnmatch
import math
import re
from collections import Counter
from typing import Literal

from jaxptd.config.checks import (
    require_below_one,
    require_not_empty,
    require_not_negative,
    require_positive,
)
from jaxptd.errors import UserError, quoted
from jaxptd.fields import check_fields, named_fields

Documents = Literal["joined", "apart", "whole"]
SpecialTokens = Literal["auto", "parse", "text"]
BeginToken = Literal["auto", "none"]
ChatFormat = Literal["auto", "messages", "sharegpt", "alpaca"]
TrainOn = Literal["assistant", "last", "all"]
TooLong = Literal["split", "cut", "drop", "refuse"]
OptimizerName = Literal["adamw", "lion", "sgd", "muon", "adafactor"]
WHOLE_MATRICES: tuple[OptimizerName, ...] = ("muon", "adafactor")  # the others are elementwise
Decay = Literal["cosine", "linear", "wsd", "constant"]
LoggerName = Literal["tensorboard", "csv", "wandb", "mlflow"]

# Fields of the section `optimizer` that a choice does not read.
_UNREAD_BY_DECAY: dict[Decay, tuple[str, ...]] = {
    "cosine": ("cooldown_steps",),
    "linear": ("cooldown_steps",),
    "wsd": (),
    "constant": ("decay_steps", "cooldown_steps", "min_learning_rate"),
}
_UNREAD_BY_NAME: dict[OptimizerName, tuple[str, ...]] = {
    "adamw": ("momentum",),
    "lion": ("epsilon", "momentum"),
    "sgd": ("beta2", "epsilon", "momentum"),
    "muon": (),
    "adafactor": ("beta1", "beta2", "epsilon", "momentum"),
}
# Fields of the section `data` that only chats read, and that chats do not read.
_OF_CHATS = ("tools_field", "chat_template", "chat_date", "train_on")
_NOT_OF_CHATS = ("text_field", "prompt_field")
RANDOM = "random"  # as checkpoint.start; a folder of this name is ./random
WARMUP_STEPS = 100
VALIDATION_LOSS = "validation_loss"  # the metric of an evaluation that every model has
SET_NAME = r"[A-Za-z0-9][\w.-]*"
LEAST_SHARE = 1e-6  # of a source in a mixture, which has it exact to a part in 2**20


@named_fields
@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The corpus of a run, and how it is read.

    Args:
        source: stdlib (the Python standard library's source text); paths or globs of text, jsonl,
            json, csv or parquet, also compressed, or of token ids (.bin of jaxptd, nanoGPT, llm.c,
            Megatron); or a mixture, with a weight for each. For images: shapes (drawn by the
            package), or folders or globs of images.
        tokenizer: bytes, or the path of a tokenizers JSON file or of a Hugging Face folder that has
            one (needs the hf extra).
        validation_fraction: fraction of the corpus, taken from its end, held out for evaluation.
        validation: further data to evaluate on, a path or glob (or a list) for each name, such as
            {law: law.jsonl, code: code.jsonl}; their losses are validation_loss/law and so on.
        documents: joined; apart (attention never crosses a document boundary within a sequence); or
            whole (apart, and no document is cut: sequences are packed from whole documents and
            padded, and learned positions begin at 0 in each).
        restart_positions: learned positions begin at 0 in each document; with documents=apart.
        special_tokens: parse (a special token's spelling in a text, such as </s>, is read as the
            token), text (it is read as plain text), or auto, as transformers: text if the
            tokenizer's folder says split_special_tokens, else parse.
        begin_token: auto (each document begins as the tokenizer's files say: Llama's with <s>), or
            none.
        text_field: field of records (jsonl, json, csv, parquet) that holds a document.
        prompt_field: field of records that holds a prompt, whose tokens are left out of the loss;
            null without prompts.
        rejected_field: field of records that holds a worse answer than text_field, or a worse chat
            than messages_field, for model.preference; null without pairs.
        messages_field: field of records that holds a chat, a list of messages, which the chat
            template writes as text; null without chats.
        format: of chats: messages (each with role and content, in messages_field or "messages"),
            sharegpt (from and value, in messages_field or "conversations"), alpaca (instruction,
            input and output are fields of the record), or auto: messages or sharegpt, whichever
            the first message of messages_field is.
        tools_field: field of records with chats that may list tools, which the template is given;
            null reads none.
        chat_template: path of a Jinja file; null is the template in the tokenizer's folder.
        chat_date: the day, such as 2026-12-31, that a template is told if it asks for today's.
        train_on: tokens of chats that count in the loss: assistant (what the assistant says), last
            (only its last turn), or all.
        too_long: a record of more than model.seq_length + 1 tokens goes on in another sequence
            (split), loses its end (cut), is left out (drop), or is an error (refuse).
        augment: rotates images by quarter turns and mirrors them; which one is a function of the
            seed and the image's number.
    """

    source: str | list[str] | dict[str, float] = dataclasses.field(
        default="stdlib", metadata={"stores": True}
    )
    tokenizer: str = dataclasses.field(default="bytes", metadata={"stores": True})
    validation_fraction: float = 0.05
    validation: dict[str, str | list[str]] | None = dataclasses.field(
        default=None, metadata={"stores": True}
    )
    documents: Documents = "joined"
    restart_positions: bool = False
    special_tokens: SpecialTokens = "auto"
    begin_token: BeginToken = "auto"
    text_field: str = dataclasses.field(default="text", metadata={"paths": False})
    prompt_field: str | None = dataclasses.field(default=None, metadata={"paths": False})
    rejected_field: str | None = dataclasses.field(default=None, metadata={"paths": False})
    messages_field: str | None = dataclasses.field(default=None, metadata={"paths": False})
    format: ChatFormat = "auto"
    tools_field: str | None = dataclasses.field(default="tools", metadata={"paths": False})
    chat_template: str | None = dataclasses.field(default=None, metadata={"stores": True})
    chat_date: str | None = dataclasses.field(default=None, metadata={"paths": False})
    train_on: TrainOn = "assistant"
    too_long: TooLong = "split"
    augment: bool = False

    @property
    def apart(self) -> bool:
        """True if attention stays within a document."""
        return self.documents != "joined"

    def __post_init__(self) -> None:
        check_fields(self, "data")
        require_below_one("data", self, "validation_fraction")
        require_not_empty("data", self, "tokenizer")
        if not self.source:
            empty = "={}" if isinstance(self.source, dict) else " is empty"
            raise UserError(f"data.source{empty}; name stdlib, or paths or globs of files")
        if isinstance(self.source, dict):
            _check_weights(self.source)
            # Sources are numbered by their names, so that their order in a file is no matter.
            object.__setattr__(self, "source", dict(sorted(self.source.items())))
        if self.validation is not None:
            _check_sets(self.validation)
            object.__setattr__(self, "validation", dict(sorted(self.validation.items())))
        require_not_empty("data", self, "text_field")
        if self.prompt_field in ("", self.text_field):
            what = "the field of the answers" if self.prompt_field else "empty"
            raise UserError(f"data.prompt_field is {what}; name the prompts' field, or use null")
        self._check_chats()
        if self.rejected_field is not None:
            self._check_pairs()

    def _check_pairs(self) -> None:
        """Raises UserError for options that pairs of answers do not support."""
        chosen = self.messages_field if self.has_chats else self.text_field
        if self.rejected_field in ("", chosen, self.prompt_field):
            what = "another field already" if self.rejected_field else "empty"
            raise UserError(
                f"data.rejected_field is {what}; name the field of worse answers, or use null"
            )
        for name, refused in (("format", "alpaca"), ("too_long", "cut")):
            if getattr(self, name) == refused:
                raise UserError(
                    f"data.{name}={refused} with data.rejected_field: pairs are whole, and chats "
                    "of pairs are lists of messages; leave one of them out"
                )
        if self.train_on != DataConfig.train_on:
            raise UserError(
                f"data.train_on={self.train_on} with data.rejected_field: of a pair all that "
                "follows the prompt counts; leave it out"
            )
        if isinstance(self.source, dict):
            raise UserError(
                "data.rejected_field with a mixture of sources, which has no pairs yet; use a list "
                "of files as data.source"
            )

    @property
    def has_chats(self) -> bool:
        """True if records hold chats."""
        return self.messages_field is not None or self.format != "auto"

    @property
    def counts_all(self) -> bool:
        """True if every token of training counts in the loss."""
        if self.rejected_field is not None:
            return False
        return self.prompt_field is None and not (self.has_chats and self.train_on != "all")

    def _check_chats(self) -> None:
        """Raises UserError for fields of chats without chats, or that exclude each other."""
        for name in ("messages_field", "tools_field", "chat_template"):
            if getattr(self, name) == "":
                raise UserError(f"data.{name} is empty; name it, or use null")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        set_fields = [name for name, value in defaults.items() if getattr(self, name) != value]
        if not self.has_chats:
            if alone := [name for name in _OF_CHATS if name in set_fields]:
                raise UserError(
                    f"data.{alone[0]}={getattr(self, alone[0])} is for chats; name their field "
                    "with data.messages_field, or leave it out"
                )
            return
        unread = [name for name in _NOT_OF_CHATS if name in set_fields]
        of_others = [name for name in unread if name == "text_field" or not self.rejected_field]
        of_others += ["messages_field"] if self.format == "alpaca" and self.messages_field else []
        if of_others:
            raise UserError(
                f"data.{of_others[0]}={quoted(getattr(self, of_others[0]))} is not for records "
                f"that hold chats (data.{'messages_field' if self.format == 'auto' else 'format'});"
                " leave one of them out"
            )
        if self.chat_date is not None:
            _check_date(self.chat_date)


def _check_date(date: str) -> None:
    try:
        datetime.date.fromisoformat(date)
    except ValueError as error:
        raise UserError(
            f"data.chat_date={quoted(date)} is not a day ({error}); write it as 2026-12-31"
        ) from error


def _check_sets(sets: dict[str, str | list[str]]) -> None:
    if not sets:
        raise UserError("data.validation={}; name a set, as {law: law.jsonl}, or leave it out")
    for name, source in sets.items():
        if not re.fullmatch(SET_NAME, name):
            raise UserError(
                f"data.validation: {quoted(repr(name))} names a set; use letters, digits, '.', "
                "'_' and '-', since it is part of the names of metrics"
            )
        if not source or (isinstance(source, list) and "" in source):
            raise UserError(f"data.validation.{name} is empty; name paths or globs of files")


def _check_weights(weights: dict[str, float]) -> None:
    for name, weight in weights.items():
        if not 0 < weight < math.inf:
            raise UserError(
                f"data.source: {quoted(repr(name))} has the weight {weight}; use a number above 0, "
                "or leave the source out"
            )
    for name, weight in weights.items():
        if weight < LEAST_SHARE * sum(weights.values()):
            raise UserError(
                f"data.source: {quoted(repr(name))} has the weight {weight}, less than a millionth "
                "of all weights; use more, or leave the source out"
            )


@named_fields
@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate.

    Args:
        name: adamw, lion (one moment, sign updates), sgd (momentum beta1), muon (orthogonalised
            momentum for the layers' matrices, adamw for the rest), or adafactor (second moments by
            row and column). All decouple weight decay from the gradient.
        learning_rate: peak learning rate, after warm-up.
        warmup_steps: steps of linear warm-up.
        warmup_fraction: instead, the fraction of decay_steps (null: of train.steps) that is
            warm-up, rounded up to whole steps; null is warmup_steps.
        decay: how the rate falls from its peak to min_learning_rate: cosine or linear after
            warm-up, wsd (stable, then linear over cooldown_steps), or constant.
        decay_steps: step at which the decay ends; null is train.steps. Set a number to be able to
            extend the run later: the rate then does not depend on train.steps.
        cooldown_steps: for wsd; null is a tenth of decay_steps.
        min_learning_rate: learning rate after the decay; null is a tenth of learning_rate.
        weight_decay: for matrices; norms and biases are not decayed.
        beta1: decay of the running mean of gradients.
        beta2: decay of the running mean of squared gradients (lion: of the stored mean).
        epsilon: added to the root of the mean squared gradient.
        momentum: decay of the running mean of gradients, for muon's matrices.
        grad_clip: largest global gradient norm; 0 never clips.
        skip_above: skip a step whose gradient norm is larger; 0 skips only non-finite gradients.
        ema_decay: decay of the exponential moving average of the parameters, which is evaluated
            and saved beside them; 0 keeps none.
        rates: factors of the learning rate by names of parameters, with * for any letters, such as
            {tokens.table: 0.1}; of parameters that none names it is 1.
        frozen: names of parameters that do not train, with * for any letters: they have no
            gradients, no moments and no weight decay, and keep their values; null is none, or with
            model.lora all but the adapters'.
    """

    name: OptimizerName = "adamw"
    learning_rate: float = 3e-4
    warmup_steps: int = WARMUP_STEPS
    warmup_fraction: float | None = None
    decay: Decay = "cosine"
    decay_steps: int | None = None
    cooldown_steps: int | None = None
    min_learning_rate: float | None = None
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.95
    grad_clip: float = 1.0
    skip_above: float = 0.0
    ema_decay: float = 0.0
    rates: dict[str, float] | None = dataclasses.field(default=None, metadata={"paths": False})
    frozen: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "optimizer")
        require_positive("optimizer", self, "learning_rate", "decay_steps", "cooldown_steps")
        require_positive("optimizer", self, "epsilon")
        require_not_negative("optimizer", self, "warmup_steps", "weight_decay", "grad_clip")
        require_not_negative("optimizer", self, "skip_above", "min_learning_rate")
        require_below_one("optimizer", self, "beta1", "beta2", "momentum", "warmup_fraction")
        require_below_one("optimizer", self, "ema_decay")
        if self.warmup_fraction is not None and self.warmup_steps != WARMUP_STEPS:
            raise UserError(
                f"optimizer.warmup_fraction={self.warmup_fraction} with optimizer.warmup_steps="
                f"{self.warmup_steps}: both say how long warm-up is; leave one of them out"
            )
        self._require_effects()
        if self.rates == {}:
            raise UserError(
                "optimizer.rates={}; name parameters, as {tokens.table: 0.1}, or leave it out"
            )
        for pattern, factor in (self.rates or {}).items():
            if not 0 < factor < math.inf:
                words = f"optimizer.rates: {quoted(repr(pattern))} has the factor {factor}"
                raise UserError(f"{words}; use a number above 0, or leave the pattern out")
        if (self.min_learning_rate or 0) > self.learning_rate:
            raise UserError(
                f"optimizer.min_learning_rate={self.min_learning_rate} is above "
                f"optimizer.learning_rate={self.learning_rate}, the peak; use a smaller one"
            )

    def rates_of(self, name: str) -> dict[str, float]:
        """The entries of `rates` that name a parameter: one at most in a run."""
        rates = (self.rates or {}).items()
        return {each: rate for each, rate in rates if fnmatch.fnmatchcase(name, each)}

    def rate_of(self, name: str) -> float:
        """The factor of a parameter's learning rate."""
        return next(iter(self.rates_of(name).values()), 1.0)

    def warmup(self, steps: int) -> int:
        """Steps of warm-up in a run of `steps`."""
        if self.warmup_fraction is None:
            return self.warmup_steps
        exact = self.warmup_fraction * (self.decay_steps or steps)
        return math.ceil(round(exact, 6))  # 0.07 * 100 is a little above 7

    def _require_effects(self) -> None:
        """Raises UserError for a field that was set and that these choices do not read."""
        unread = _UNREAD_BY_DECAY[self.decay] + _UNREAD_BY_NAME[self.name]
        for field in dataclasses.fields(self):
            if field.name in unread and getattr(self, field.name) != field.default:
                cause = "decay" if field.name in _UNREAD_BY_DECAY[self.decay] else "name"
                raise UserError(
                    f"optimizer.{field.name} has no effect with optimizer.{cause}="
                    f"{getattr(self, cause)}; leave it out"
                )


@named_fields
@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The length of a run, its batches, and where it writes.

    Args:
        steps: optimizer steps in total.
        global_batch_size: sequences per step, over all devices.
        micro_batches: equal slices of each device's batch, run one after another with their
            gradients summed.
        max_skipped: consecutive skipped steps after which the run ends.
        check_steps: what is checked after each step: none; skipped (a skipped step is run again, to
            tell bad data from faulty hardware); replicas (also, whether devices that hold copies
            of the same parameters and moments hold the same bits).
        seed: of initial parameters, dropout and data order.
        log_every: steps between log lines; 0 is never.
        eval_every: steps between evaluations; 0 is never.
        eval_batches: global batches per evaluation.
        patience: the run ends after this many evaluations in a row without a better
            checkpoint.best_metric; 0 never ends it early.
        min_improvement: a metric is better only if it improves by more than this.
        sample_tokens: tokens of sample text to generate at the end; 0 is none.
        run_dir: folder for everything the run writes, or its URL in a store.
        loggers: where metrics go besides metrics.jsonl: tensorboard, csv, wandb, mlflow; null is
            tensorboard if its package is installed.
        profile: first and last step to trace with JAX's profiler, into run_dir; null traces none.
        platform: auto, or cpu to simulate devices on the CPU.
    """

    steps: int = 1000
    global_batch_size: int = 8
    micro_batches: int = 1
    max_skipped: int = 10
    check_steps: Literal["none", "skipped", "replicas"] = "none"
    seed: int = dataclasses.field(default=0, metadata={"below": 2**32})
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 8
    patience: int = 0
    min_improvement: float = 0.0
    sample_tokens: int = 200
    run_dir: str = dataclasses.field(default="runs/default", metadata={"stores": True})
    loggers: list[LoggerName] | None = None
    profile: list[int] | None = None
    platform: Literal["auto", "cpu"] = "auto"

    def __post_init__(self) -> None:
        check_fields(self, "train")
        require_positive("train", self, "steps", "global_batch_size", "micro_batches")
        require_positive("train", self, "max_skipped", "eval_batches")
        require_not_negative("train", self, "seed", "log_every", "eval_every", "sample_tokens")
        require_not_negative("train", self, "patience", "min_improvement")
        require_not_empty("train", self, "run_dir")
        if self.patience and not self.eval_every:
            raise UserError(
                f"train.patience={self.patience} counts evaluations, and train.eval_every=0 has "
                "none; leave one of them out"
            )
        if self.min_improvement and not self.patience:
            raise UserError(
                f"train.min_improvement={self.min_improvement} has no effect without "
                "train.patience; set that as well, or leave it out"
            )
        if repeated := [name for name, n in Counter(self.loggers or ()).items() if n > 1]:
            raise UserError(f"train.loggers names {repeated[0]} twice; name it once")
        self._check_window()

    def _check_window(self) -> None:
        """Raises UserError unless `profile` is null or two steps of the run, in their order."""
        if self.profile is None:
            return
        shown = f"train.profile={quoted(self.profile)}"
        if len(self.profile) != 2:
            raise UserError(f"{shown}: use its first and last step, as in [100, 103]")
        first, last = self.profile
        if not 1 <= first <= last:
            raise UserError(
                f"{shown}: steps count from 1, and the last is not before the "
                "first; use [100, 103], say"
            )
        if last > self.steps:
            raise UserError(
                f"{shown} ends after train.steps={self.steps}; use steps that the run has"
            )


@named_fields
@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When a run saves checkpoints, which it keeps, and what it resumes from.

    Args:
        every: steps between checkpoints; 0 is never.
        keep: number of newest checkpoints to keep.
        keep_best: how many more checkpoints to keep, the best ones.
        best_metric: what makes a checkpoint the best: the lowest validation_loss (of the held-out
            part), validation_loss/law (of the set law of data.validation), or any other metric of
            evaluations; of accuracy and Dice the highest.
        asynchronous: keep training while a checkpoint is written.
        memory_every: steps between states kept in memory_dir, from which a run whose process has
            died goes on without checkpoints; 0 is never.
        memory_dir: folder of each host for these states, in memory or on a disk of its own, which
            outlives processes.
        resume: auto (the newest valid checkpoint in run_dir, or the newest state in memory_dir if
            it is newer), best (the best by best_metric; later ones are set aside), never, or the
            path of a checkpoint.
        start: initial weights of a new run: the path of a Hugging Face directory, a checkpoint or a
            run; random and null initialise them at random.
        data: same (a run resumes only with the data it began with; data that has grown or been
            replaced is refused), or any.
    """

    every: int = 500
    keep: int = 2
    keep_best: int = 1
    best_metric: str = dataclasses.field(default=VALIDATION_LOSS, metadata={"paths": False})
    asynchronous: bool = True
    memory_every: int = 0
    memory_dir: str = "/dev/shm"
    resume: str = dataclasses.field(default="auto", metadata={"stores": True})
    start: str | None = dataclasses.field(default=None, metadata={"stores": True})
    data: Literal["same", "any"] = "same"

    def __post_init__(self) -> None:
        check_fields(self, "checkpoint")
        require_not_negative("checkpoint", self, "every", "keep_best", "memory_every")
        require_positive("checkpoint", self, "keep")
        require_not_empty("checkpoint", self, "resume", "memory_dir", "best_metric")
        if self.start is None:
            return
        require_not_empty("checkpoint", self, "start")
        if self.resume not in ("auto", "never"):
            raise UserError(
                f"checkpoint.start={self.start} has no effect with checkpoint.resume="
                f"{self.resume}; leave one of them out"
            )
