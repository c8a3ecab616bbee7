"""`Run`: what `jaxptd.train` and `jaxptd.load` return."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Self

import jax
import numpy as np

from jaxptd.api.whole_batches import LossAndGradients, WholeBatches
from jaxptd.config import Config
from jaxptd.data import Data, Samples, Tokenizer
from jaxptd.display import Table, bytes_text, count_text, html_of
from jaxptd.distributed.watchdog import Phase, Watchdog
from jaxptd.errors import UserError
from jaxptd.fields import check_range, checked
from jaxptd.generate import Sampling, Writer, check_tokens
from jaxptd.hf.base import keep_base
from jaxptd.models.families import open_data_of
from jaxptd.run.checkpoints import RunCheckpoints
from jaxptd.run.evaluation import evaluated_samples, mean_losses, require_targets
from jaxptd.run.folder import Row, RunDir
from jaxptd.run.health import Health
from jaxptd.run.metrics import columns
from jaxptd.step import Batch, Program, State
from jaxptd.step.program import Programs, as_state, check_unused
from jaxptd.stores import Place
from jaxptd.vision.masks import classes_of

# ---- the state, shown ----------------------------------------------------------------------------


@jax.tree_util.register_pytree_with_keys_class
class ShownState(dict[str, Any]):
    """A dict of arrays, or of dicts of them, with a short text. A pytree, as a dict is.

    It is a view of a run's state, so its entries cannot be set.

    >>> import jax.numpy as jnp
    >>> ShownState(params={"w": jnp.ones((2, 3))}, step=jnp.int32(4))
    params, step: 2 arrays, 7 numbers, 28 bytes
    """

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        return ShownState(value) if type(value) is dict else value

    def __repr__(self) -> str:
        leaves = [x for x in jax.tree.leaves(self) if hasattr(x, "nbytes")]
        names = ", ".join(list(self)[:4]) + (f" and {len(self) - 4} more" if len(self) > 4 else "")
        numbers, size = sum(x.size for x in leaves), sum(x.nbytes for x in leaves)
        return f"{names}: {len(leaves)} arrays, {count_text(numbers)} numbers, {bytes_text(size)}"

    def tree_flatten_with_keys(self) -> tuple[Iterable[tuple[Any, Any]], Hashable]:
        keys = tuple(sorted(self))
        return [(jax.tree_util.DictKey(key), self.get(key)) for key in keys], keys

    @classmethod
    def tree_unflatten(cls, keys: Any, values: Iterable[Any]) -> Self:
        return cls(zip(keys, values, strict=True))

    def __reduce__(self) -> tuple[type[Self], tuple[dict[str, Any]]]:
        return type(self), (dict(self),)  # copying does not set entries

    # ---- refused --------------------------------------------------------------------------------

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(
            "an entry of run.state cannot be set, because the run would not see it; replace it: "
            'run.state = {**run.state, "params": params}'
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


# ---- a run ---------------------------------------------------------------------------------------

Metrics = dict[str, np.ndarray]
LAST_SAMPLE = 2**62  # leaves room for a batch after it in int64


@dataclasses.dataclass(eq=False, repr=False)
class Run:
    """A run with its newest state, as `train`, `load` and `from_hf` return it.

    >>> run = jaxptd.load("runs/quickstart")  # doctest: +SKIP
    >>> run.metrics["loss"][-1], run.evaluate(), run.sample("def ")  # doctest: +SKIP

    Args:
        program: the compiled steps; `program.train_step(run.state, batch)` is one of training.
        tokenizer: of the text.
        opened: opens the corpus, when it is first needed.
        run_dir: the run's directory.
        say: prints a line.
        watchdog: of the thread that runs the steps.
        arrays: the state, as the steps take and return it.
        stopped: True if a signal ended the training before its last step.
    """

    program: Program
    tokenizer: Tokenizer
    opened: Callable[[], Data]
    run_dir: RunDir
    say: Callable[[str], None]
    watchdog: Watchdog = dataclasses.field(default_factory=Watchdog)
    arrays: State = dataclasses.field(default_factory=dict)
    stopped: bool = False

    @property
    def config(self) -> Config:
        return self.program.config

    @property
    def path(self) -> Path:
        """The run's directory; of a run in a store, the folder with its files on this machine."""
        return self.run_dir.path

    @property
    def state(self) -> ShownState:
        """Parameters, optimizer, step and guard, a dict of global arrays. May be replaced.

        Setting it raises UserError if an array's name, shape, precision or sharding is another.
        """
        return ShownState(self.arrays)

    @state.setter
    def state(self, state: State) -> None:
        self.arrays = as_state(state, self.program.abstract_state, name="run.state")

    @property
    def step(self) -> int:
        """Steps that the state has been trained."""
        check_unused({"step": self.arrays["step"]})
        return int(self.arrays["step"])

    @cached_property
    def data(self) -> Data:
        """The corpus, split for training and validation."""
        return self.opened()

    @property
    def metrics(self) -> Metrics:
        """The columns of metrics.jsonl, arrays with a value for each logged step.

        NaN where a step has no such value: losses of validation are there for some steps only.
        """
        return columns(self.run_dir.metrics())

    def evaluate(self) -> dict[str, float]:
        """Mean loss, nats a token, over the first `eval_batches` batches of the validation part.

        Also of each set of `data.validation`, as `validation_loss/NAME`. Empty without any
        (`data.validation_fraction` 0).
        """
        check_unused(self.arrays)
        found: dict[str, float] = {}
        for name, windows in self.data.evaluated.items():
            found |= mean_losses(self.config.model, self._evaluated(windows), name)
        return found

    def _evaluated(self, windows: Samples) -> list[dict[str, Any]]:
        """The sums of losses and targets of each batch of an evaluation."""
        size, number = self.config.train.global_batch_size, windows.windows_per_epoch
        batches = math.ceil(evaluated_samples(windows, self.config.train) / size)
        sums = []
        for i in range(batches):
            batch = self.read_batch(windows, i * size, beyond=number)
            program, params = self.program.eval_step, self.arrays["params"]
            with self.programs.ready("eval_step", program, params, batch) as eval_step:
                sums.append(eval_step(params, batch))
        return sums

    @checked("jaxptd.Run.sample")
    def sample(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        temperature: float = Sampling.temperature,
        top_k: int = Sampling.top_k,
        top_p: float = Sampling.top_p,
        min_p: float = Sampling.min_p,
        repetition_penalty: float = Sampling.repetition_penalty,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> str:
        """The prompt and the text that the model adds to it; of an encoder-decoder its answer.

        The text ends at any of the tokenizer's ends.

        Args:
            prompt: text to continue; empty starts a document.
            tokens: to generate.
            temperature: of the draws; 0 takes the most likely token.
            top_k: draw from the k most likely tokens; 0 from all.
            top_p: draw from the most likely tokens that together have this probability.
            min_p: draw from tokens with this share of the most likely one's probability.
            repetition_penalty: above 1, tokens that the text has already are less likely.
            seed: of the draws.
            stop: further texts before which the text ends.

        Raises:
            UserError: the model's vocabulary lacks an id of the prompt.
        """
        check_tokens("tokens", tokens)
        sampling = Sampling(temperature, top_k, seed, top_p, min_p, repetition_penalty)
        return self._writer(sampling, stop)(prompt, tokens)

    @checked("jaxptd.Run.stream")
    def stream(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        temperature: float = Sampling.temperature,
        top_k: int = Sampling.top_k,
        top_p: float = Sampling.top_p,
        min_p: float = Sampling.min_p,
        repetition_penalty: float = Sampling.repetition_penalty,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> Iterator[str]:
        """The text of `sample` in pieces: the prompt, then what the model adds, as it is written.

        Characters are never split between pieces. The model stops at a stop, and when the iterator
        is dropped.

        >>> for piece in run.stream("def ", stop=["return"]):  # doctest: +SKIP
        ...     print(piece, end="", flush=True)

        Args:
            prompt: text to continue; empty starts a document.
            tokens: to generate.
            temperature: of the draws; 0 takes the most likely token.
            top_k: draw from the k most likely tokens; 0 from all.
            top_p: draw from the most likely tokens that together have this probability.
            min_p: draw from tokens with this share of the most likely one's probability.
            repetition_penalty: above 1, tokens that the text has already are less likely.
            seed: of the draws.
            stop: further texts before which the text ends.

        Raises:
            UserError: as `sample`, at once; or the run's state was trained on in between.
        """
        check_tokens("tokens", tokens)
        sampling = Sampling(temperature, top_k, seed, top_p, min_p, repetition_penalty)
        write = self._writer(sampling, stop)
        return _while_unused(write.stream(prompt, tokens), {"params": write.params})

    def _writer(self, sampling: Sampling, stop: Sequence[str]) -> Writer:
        check_unused(self.arrays)
        return Writer(self.program, self.arrays["params"], self.tokenizer, sampling, stop)

    @checked("jaxptd.Run.classes")
    def classes(self, images: np.ndarray) -> np.ndarray:
        """The most likely class of each pixel, int32[B, rows, columns], or of each image, `[B]`.

        Args:
            images: any number of them, `[B, rows, columns, channels]` with mean 0 and variance 1.

        Raises:
            UserError: the model is not one of images, or they are of another size.
        """
        check_unused(self.arrays)
        return classes_of(self.program, self.arrays["params"], images)

    def loss_and_gradients(self, batch: Mapping[str, np.ndarray]) -> LossAndGradients:
        """The loss of a batch, nats a target, and its gradients, whole and canonical.

        >>> loss, gradients = run.loss_and_gradients(batch)  # doctest: +SKIP
        >>> run.loss_and_gradients(batch).losses  # doctest: +SKIP
        {'mlm': 5.7, 'nsp': 0.69}

        `jaxptd.hf.names(run.program, gradients)` has them under Hugging Face's names.

        Args:
            batch: whole numbers, the fields of the model's family: a decoder's are
                `{"tokens": [B, T], "targets": [B, T]}`. A target of -1 does not count. Any B, and T
                up to the model's length.

        Raises:
            UserError: the batch has other arrays, or no target for one of the losses.
        """
        check_unused(self.arrays)
        return self._whole_batches.loss_and_gradients(self.arrays, batch)

    def logits(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """The logits `[B, T, V]` of a batch's tokens `[B, T]`.

        Raises:
            UserError: other tokens, or a model that continues no text.
        """
        check_unused(self.arrays)
        return self._whole_batches.logits(self.arrays["params"], batch)

    @cached_property
    def _whole_batches(self) -> WholeBatches:
        return WholeBatches(self.program)

    def save(self) -> Place:
        """Saves the state as a checkpoint of its step, and returns the checkpoint's folder or URL.

        Raises:
            UserError: a parameter is not finite.
            CheckpointError: the checkpoint could not be written.
        """
        check_unused(self.arrays)
        step = self.step
        rows = [row for row in self.run_dir.metrics() if row["step"] == step]
        self.checkpoint(step, rows[-1] if rows else None)
        self.checkpoints.store.wait()
        keep_base(self.run_dir, self.config, say=self.say)
        self.run_dir.publish()
        return self.run_dir.checkpoints / f"{step:08d}"

    @checked("jaxptd.Run.read")
    def read(self, windows: Samples, first: int, *, beyond: float = math.inf) -> Batch:
        """Reads the batch that begins with sample number `first`.

        Args:
            windows: `data.train` or `data.validation`.
            first: sample number, 0 or more.
            beyond: samples from this number on are masked out of the loss.
        """
        check_range("jaxptd.Run.read", "first", first, least=0, most=LAST_SAMPLE)
        return self.read_batch(windows, first, beyond=beyond)

    # ---- for training ---------------------------------------------------------------------------

    @cached_property
    def checkpoints(self) -> RunCheckpoints:
        opened = self.__dict__.get("data")  # a loaded run may be saved without its data
        identity = opened.identity if opened else {}
        return RunCheckpoints(self.program, self.run_dir, self.say, identity)

    @cached_property
    def health(self) -> Health:
        return Health(self.config.train.max_skipped, self._good_steps)

    @cached_property
    def programs(self) -> Programs:
        return Programs(self.watchdog)

    def checkpoint(self, step: int, row: Row | None) -> None:
        """Saves the state after a step, with that step's evaluation if its row has one."""
        self.health.check_params(step, self.arrays["params"])
        self.checkpoints.save(self.arrays, step, row)

    def keep(self, step: int) -> None:
        """Keeps the state after a step in the hosts' memory (`checkpoint.memory_every`)."""
        self.health.check_params(step, self.arrays["params"])
        self.checkpoints.keep(self.arrays, step)

    def read_batch(self, windows: Samples, first: int, *, beyond: float = math.inf) -> Batch:
        """Reads a batch like `read`, without checking the arguments."""
        end = self.tokenizer.end_of_document
        with self.watchdog.phase(Phase.READING):
            return self.program.batches.of_samples(
                windows, first, end_of_document=end, beyond=beyond
            )

    def _good_steps(self) -> list[int]:
        with self.watchdog.phase(Phase.SAVING):
            return self.checkpoints.good_steps()

    # ---- display --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return "\n  ".join([self._title, *(f"{name}: {value}" for name, value in self._facts())])

    def _repr_html_(self) -> str:
        return html_of(Table(self._title, ("", ""), list(self._facts())))

    @property
    def _title(self) -> str:
        return f"Run at step {self.step} of {self.config.train.steps}"

    def _facts(self) -> list[tuple[str, str]]:
        """Names and values of most interest."""
        parameters = sum(math.prod(info.shape) for info in self.program.infos.values())
        devices = self.program.mesh.devices
        kind = f"{devices.size} x {devices.flat[0].device_kind}"
        rows = self.run_dir.metrics()
        losses = {
            name: value
            for row in rows
            for name, value in row.items()
            if name.partition("/")[0] in ("loss", "validation_loss") and value is not None
        }
        layers = self.config.model.num_layers
        return [
            ("model", f"{count_text(parameters)} parameters, {layers} layers"),
            ("layout", f"{self.config.layout} on {kind}"),
            ("directory", str(self.run_dir.where)),
            *((name.replace("_", " "), f"{value:.4f}") for name, value in losses.items()),
        ]


def open_corpus(config: Config, tokenizer: Tokenizer) -> Data:
    """Opens the data of a run.

    Raises:
        UserError: as `open_data`, or an evaluation has no targets.
    """
    data = open_data_of(config, tokenizer)
    for name, windows in data.evaluated.items():
        require_targets(windows, config, name)
    return data


def _while_unused(pieces: Iterator[str], state: State) -> Iterator[str]:
    """The pieces, as long as no step has donated the memory of the state that they come from."""
    while True:
        check_unused(state)
        try:
            piece = next(pieces)
        except StopIteration:
            return
        yield piece
