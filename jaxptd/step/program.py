"""The compiled steps of any layout, and where their state and batches are placed."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_leaves_with_path

from jaxptd.config import Config
from jaxptd.config.xla import GPU_MEMORY, permutes
from jaxptd.distributed import coordination
from jaxptd.distributed.watchdog import Phase, Watchdog
from jaxptd.errors import UserError, quoted
from jaxptd.fields import check_argument, checked
from jaxptd.matmul.precision import exact_products
from jaxptd.mesh import SAMPLE_AXES, SEQUENCE_AXES, jax_option, on_gpus
from jaxptd.models.families import family_of
from jaxptd.params import ParamInfo, Params
from jaxptd.step.batch import ARRANGED, Batch, Batches
from jaxptd.step.body import StepBody
from jaxptd.step.resolved import ResolvedConfig, resolve
from jaxptd.step.state import Metrics, State, States, state_memory
from jaxptd.zero.plan import layers_plan
from jaxptd.zero.shards import on_device

# ---- states that Python code gives: compared with those that a program takes ---------------------

USED = (
    "was given to train_step, which uses the memory again; set run.state to the state that "
    "train_step returns"
)


def as_state(state: Any, like: State, *, name: str = "state") -> State:
    """Returns a state as plain dicts, with the arrays that it has.

    Args:
        state: a dict of arrays, or of dicts of them.
        like: shapes, precisions and shardings that it has to have, as `Program.abstract_state`.
        name: of the state, for messages.

    Raises:
        UserError: an entry is missing, unknown, or not as in `like`; names the first.
    """
    given, wanted = _entries(state, name), _entries(like, name)
    for key in [*wanted, *given]:
        if key not in given:
            raise UserError(f"{name}{key} is missing; use every entry of program.abstract_state")
        if key not in wanted:
            raise UserError(f"{name}{key} is no entry of this program's state; leave it out")
        if wrong := _difference(given[key], wanted[key]):
            raise UserError(f"{name}{key} {wrong}")
    return jax.tree.unflatten(jax.tree.structure(like), [given[key] for key in wanted])


def check_unused(state: State) -> None:
    """Raises UserError if a step has donated the memory of a state's arrays."""
    for path, x in tree_leaves_with_path(state):
        if x.is_deleted():
            raise UserError(f"state{keystr(path)} {USED}")


def _entries(state: Any, name: str) -> dict[str, Any]:
    """The arrays of a state by their place in it, as `['params']['norm.scale']`."""
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise UserError(f"{name} is of type {kind}; use a dict of arrays: {{**run.state, ...}}")
    try:
        return {keystr(path): x for path, x in tree_leaves_with_path(dict(state))}
    except (TypeError, ValueError) as error:  # keys that cannot be sorted
        raise UserError(f"{name} has keys of several types; use those of run.state") from error


def _difference(x: Any, like: jax.ShapeDtypeStruct) -> str:
    """Says in which way an array is not like another; empty if it is."""
    if not isinstance(x, Array):
        return f"is of type {type(x).__name__}; use a JAX array: jax.device_put(x, old.sharding)"
    if x.is_deleted():
        return USED
    if (x.shape, x.dtype) != (like.shape, like.dtype):
        given, wanted = f"{x.dtype}{list(x.shape)}", f"{like.dtype}{list(like.shape)}"
        return f"is {quoted(given)}; this program has {quoted(wanted)}"
    if like.sharding is not None and not x.sharding.is_equivalent_to(like.sharding, x.ndim):
        return "is on other devices, or sharded in another way; use jax.device_put(x, old.sharding)"
    return ""


# ---- a compiled step that also takes batches of numpy arrays -------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledStep:
    """A jitted function of arrays and a batch, with its methods `lower` and `trace`.

    Args:
        jitted: (arrays, batch on devices) -> anything.
        place: checks a batch of numpy arrays, in text order, and puts it on the mesh.
        check: raises UserError if arrays are not those that the step takes; called when it fails.
    """

    jitted: Any
    place: Callable[[Mapping[str, np.ndarray]], Batch]
    check: Callable[[Any], object] = lambda arrays: None

    def __call__(self, arrays: Any, batch: Mapping[str, Any]) -> Any:
        """Runs the step; a batch of numpy arrays is placed first.

        Raises:
            UserError: the batch is not one that the config has, or the arrays not the program's.
        """
        is_dict = isinstance(batch, Mapping)
        on_host = [isinstance(x, np.ndarray) for x in batch.values()] if is_dict else [True]
        if any(on_host) and not all(on_host):
            raise UserError("a batch mixes numpy arrays with others; use Program.place for all")
        return self._run(arrays, self.place(batch) if any(on_host) else batch)

    def _run(self, arrays: Any, batch: Mapping[str, Any]) -> Any:
        try:
            return self.jitted(arrays, batch)
        except UserError:
            raise
        except (TypeError, ValueError, LookupError, OverflowError):
            self.check(arrays)
            raise
        except RuntimeError as error:
            if "deleted" in str(error):  # else an error of the devices, as memory that ran out
                self.check(arrays)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)


# ---- XLA's options beyond its defaults for a training step ---------------------------------------

_SCHEDULED = 0.80  # share of a GPU's memory that XLA's scheduler counts on, times an option


def compiler_options(config: Config, *, on_gpus: bool) -> dict[str, Any] | None:
    """Chooses options for compiling a training step on GPUs; None elsewhere.

    Memory: the scheduler may count on all memory that a run takes. If it believes that a step does
    not fit, it overlaps no collective with work.

    Collectives: two at a time, while XLA by default finishes one before it starts the next.
    Backward of a ring sends keys and values, and also the sums of their gradients. Matmuls on a
    grid send along row and along col. A loop over layers gathers one layer and reduce-scatters the
    gradients of another.

    Matmuls: XLA would join matmuls of the same operand and split the result by copies. Separate
    ones of queries, keys and values can add their biases as they write. The steps of a matmul whose
    blocks arrive one after another also stay separate. For fp8, cuBLASLt's 8-bit matmuls replace
    the Triton kernels that XLA prefers.

    Zeros: a loop over layers writes each slice of what it saves for backward, and of its gradients.
    XLA would first fill these arrays with zeros, unless told to check whether anything reads them.
    With moments on the host that check costs memory, so there it is off.

    Slices: XLA by default overlaps copies into and out of a loop's stacks with other kernels. A
    loop whose first micro-batch gathers would then start its collectives too late to hide them.

    Iterations: in a loop that fetches layers, each iteration copies the next layer's parameters and
    its own gradients to where the next one reads them. With two iterations in one, only the second
    does.

    Permutes: a permute synchronises only the devices that it connects, not all as by default, which
    by XLA's own account makes one inside a node ten to twenty times slower. XLA may hang unless
    each group of devices belongs to only one partition of all devices. That holds for rings along
    axes and for the hops of pipelines, but not when Cannon's algorithm moves blocks to their start.
    """
    if not on_gpus:
        return None
    layout, plan = config.layout, layers_plan(config)
    options: dict[str, Any] = {
        "xla_gpu_memory_limit_slop_factor": round(100 * GPU_MEMORY / _SCHEDULED),
        "xla_gpu_dot_merger_threshold_mb": 0,
        "xla_gpu_enable_dus_accumulator_zero_init_elimination": not layout.hosts_moments,
    }
    moves = plan.prefetches or plan.reduce == "last_microbatch"
    if layout.ring_size > 2 or layout.has_grid or moves:
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = 2
    if plan.gather == "first_microbatch":
        options["xla_disable_hlo_passes"] = "dynamic-slice-copy-fusion-async-wrapper"
    if plan.joins_trips:
        options["xla_gpu_enable_while_loop_double_buffering"] = True
    if permutes(layout) and layout.matmul2d != "cannon":
        options["xla_gpu_collective_permute_connected_components"] = True
    if config.model.products == "fp8":
        options["xla_gpu_enable_triton_gemm"] = False
    return options


# ---- the program of a config ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """The compiled steps of a config on a mesh, for a training loop of your own.

    >>> import jaxptd
    >>> config = jaxptd.Config(jaxptd.ModelConfig(vocab_size=257), jaxptd.Layout(tp=2))
    >>> program = Program(config, jaxptd.make_mesh(config.layout))
    >>> program.infos["blocks.mlp.up.w"].shape  # L, D, F
    (4, 256, 1024)

    Args:
        config: what the steps compute.
        mesh: the mesh of the config's layout, from `make_mesh`.

    Raises:
        UserError: the mesh is not that of the layout, model.vocab_size is null, or model.dtype is
            float64 and JAX has none.
    """

    config: Config
    mesh: Mesh

    def __post_init__(self) -> None:
        for name, kind in (("config", Config), ("mesh", Mesh)):
            check_argument("jaxptd.Program", name, getattr(self, name), kind)
        layout, model = self.config.layout, self.config.model
        sizes = dict(self.mesh.shape)
        if list(sizes.items()) != list(layout.sizes.items()):
            axes = " ".join(f"{axis}={size}" for axis, size in sizes.items())
            raise UserError(
                f"the mesh ({axes}) is not that of config.layout ({layout}); use "
                "make_mesh(config.layout)"
            )
        family_of(model).check(self.config)
        if model.dtype == "float64" and not jax_option("jax_enable_x64"):
            raise UserError(
                "model.dtype=float64: JAX makes float32 of it; call "
                'jax.config.update("jax_enable_x64", True) first'
            )

    @cached_property
    def resolved(self) -> ResolvedConfig:
        """The config with its choices made for this mesh."""
        return resolve(self.config, self.mesh)

    @property
    def infos(self) -> dict[str, ParamInfo]:
        """Shapes and shardings of the parameters, as layers hold them."""
        return self.resolved.infos

    @cached_property
    def body(self) -> StepBody:
        """The functions that each device runs inside the `shard_map`."""
        return StepBody.of(self.resolved, self.states)

    # ---- state and batch ------------------------------------------------------------------------

    @cached_property
    def states(self) -> States:
        """Shapes, shardings and memory of the state."""
        return States(
            self.resolved.stored,
            self.resolved.optimizer,
            self.mesh,
            dtype=self.resolved.master_dtype,
            model_dtype=self.resolved.model.dtype,
            memory=state_memory(self.config.layout),
        )

    @property
    def abstract_state(self) -> State:
        """Shapes, precisions and shardings of the state, for compiling without a state."""
        return self.states.abstract

    def init_state(self) -> State:
        """The state of step 0: the same numbers on every mesh."""
        return self.states.new(self.initial(self.states.stored))

    def initial(self, names: Collection[str]) -> Params:
        """The initial numbers of some parameters, as the state holds them."""
        if not names:
            return {}
        return self.resolved.blueprint.init(
            self.config.train.seed,
            mesh=self.mesh,
            dtype=self.resolved.master_dtype,
            stored={name: self.states.stored[name] for name in names},
        )

    @checked("jaxptd.Program.canonical")
    def canonical(self, params: Mapping[str, Array]) -> Params:
        """Parameters, or gradients, as the state holds them -> canonical, in device memory.

        Raises:
            UserError: the model has no such parameter.
        """
        if unknown := [name for name in params if name not in self.states.stored]:
            raise UserError(f"the model has no parameter {quoted(unknown[0])}; see Program.infos")
        return self._canonical(dict(params))

    @cached_property
    def _canonical(self) -> Callable[[Params], Params]:
        """`canonical` as one program: collectives of many small ones may wait for each other."""

        def canonical(params: Params) -> Params:
            return {
                name: self.states.stored[name].to_canonical(x)
                for name, x in on_device(params).items()
            }

        return jax.jit(canonical)

    @cached_property
    def batches(self) -> Batches:
        """Builds this program's batches."""
        return Batches(self.config, self.mesh, self.resolved.tensor_parallel.ring)

    @property
    def abstract_batch(self) -> Batch:
        """Shapes and shardings of a batch, for compiling without a batch."""
        return self.batches.abstract

    def place(self, batch: Mapping[str, np.ndarray]) -> Batch:
        """Puts a whole batch, in text order, on the mesh.

        Raises:
            UserError: the batch has other fields, shapes or types than the config needs, or ids
                outside the vocabulary.
        """
        return self.batches.place(batch)

    # ---- compiled: batches are on the mesh, or numpy arrays in text order ------------------------

    @cached_property
    def train_step(self) -> Callable[[State, Batch], tuple[State, Metrics]]:
        """(state, batch) -> (state, metrics); the old state's memory is used again."""
        step = self._train
        jitted = jax.jit(
            lambda state, batch: step(state, batch)[:2],
            donate_argnums=0,
            compiler_options=compiler_options(self.config, on_gpus=on_gpus(self.mesh)),
        )
        return CompiledStep(jitted, self.place, self._check_state)

    @cached_property
    def step_metrics(self) -> Callable[[State, Batch], Metrics]:
        """(state, batch) -> metrics of the step; keeps the state, and updates nothing."""
        step = self._train
        jitted = jax.jit(
            lambda state, batch: step(state, batch)[1],
            compiler_options=compiler_options(self.config, on_gpus=on_gpus(self.mesh)),
        )
        return CompiledStep(jitted, self.place, self._check_state)

    @cached_property
    def step_with_gradients(self) -> Callable[[State, Batch], tuple[State, Metrics, Params]]:
        """(state, batch) -> (state, metrics, reduced gradients); keeps the old state."""
        return CompiledStep(jax.jit(self._train), self.place, self._check_state)

    @cached_property
    def gradients(self) -> Callable[[State, Batch], tuple[Array, Metrics, Params]]:
        """(state, batch) -> (loss, its terms by name, reduced gradients); updates nothing."""
        step = self._train
        names = [name for name, term in self.body.terms.items() if term.trained]

        def gradients(state: State, batch: Batch) -> tuple[Array, Metrics, Params]:
            _, metrics, grads = step(state, batch)
            loss = metrics["loss"]  # the only term has no metric of its own
            return loss, {name: metrics.get(name, loss) for name in names}, grads

        return CompiledStep(jax.jit(gradients), self.place, self._check_state)

    @cached_property
    def eval_step(self) -> Callable[[Params, Batch], dict[str, Metrics]]:
        """(params, batch) -> of each loss `sum`, in nats, and `targets`, their number; no dropout.

        A decoder's: `{"cross_entropy": {"sum": ..., "targets": ...}}`.
        """
        params = self.states.specs["params"]
        evaluate = self._on_mesh(self.body.evaluate, params, outs=P())
        return CompiledStep(jax.jit(evaluate), self.place, self._check_params)

    @cached_property
    def log_probabilities(self) -> Callable[[Params, Batch], Array]:
        """(params, batch) -> the sum of the targets' log-probabilities in each document, `[B, K]`.

        In nats, of a model with `model.preference`: K is the most
        documents that a sequence can hold, chosen and rejected in turn; further ones are zero. No
        dropout.
        """
        params = self.states.specs["params"]
        mapped = self._on_mesh(self.body.log_probabilities, params, outs=P())
        return CompiledStep(jax.jit(mapped), self.place, self._check_params)

    @cached_property
    def classes(self) -> Callable[[Params, Batch], Array]:
        """(params, batch) -> the most likely classes, int32, of a model that has logits of them.

        Of pixels `[B, rows, columns]`, of images `[B]`; whole on every device.
        """
        field = self.resolved.family.classes
        assert field is not None, "the output is of a vocabulary"
        params, classes = self.states.specs["params"], self.batches.specs[field]
        mapped = self._on_mesh(self.body.classes, params, outs=classes)
        whole = jax.jit(mapped, out_shardings=NamedSharding(self.mesh, P()))
        return CompiledStep(whole, self.place, self._check_params)

    @checked("jaxptd.Program.choices")
    def choices(
        self, params: Params, batch: Mapping[str, Any], *, step: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Records which experts each token goes to.

        Args:
            params: the state's.
            batch: as for the train step.
            step: the training step whose dropout the tokens meet; None: without dropout.

        Returns:
            The experts of each token in each layer, best first, int32 `[B, T, L, K]`, and how much
            better the last of them is than the next, `[B, T, L]`, in the router's scores: infinite
            where all experts are chosen. If the last of their groups is better than the next group
            by less, it is that. Layers without experts have zeros.

        Raises:
            UserError: the model has no experts, its layers are on stages, or the step is negative.
        """
        if step is not None and step < 0:
            raise UserError(f"Program.choices: step is {step}; use 0 or more, or None")
        if self.config.model.moe is None or self.config.layout.pp > 1:
            raise UserError(
                "Program.choices: the model has no experts"
                if self.config.model.moe is None
                else f"Program.choices with layout.pp={self.config.layout.pp}: use layout.pp=1"
            )
        seen, where = jax.device_get(self._choices(step)(params, batch))
        experts, margins = (self.batches.as_given("tokens", x, where) for x in seen)
        return experts, margins

    @cached_property
    def _choices(self) -> Callable[[int | None], Callable[[Params, Any], Any]]:
        tokens = self.resolved.tensor_parallel.axes.tokens
        spec, params = P(SAMPLE_AXES, (*SEQUENCE_AXES, *tokens)), self.states.specs["params"]

        @functools.cache
        def of_step(step: int | None) -> Callable[[Params, Any], Any]:
            mapped = self._on_mesh(partial(self.body.choices, step=step), params, outs=spec)

            def with_places(params: Params, batch: Batch) -> tuple[Any, Batch]:
                return mapped(params, batch), {x: batch[x] for x in ARRANGED if x in batch}

            whole = jax.jit(with_places, out_shardings=NamedSharding(self.mesh, P()))
            return CompiledStep(whole, self.place, self._check_params)

        return of_step

    @cached_property
    def _train(self) -> Callable[[State, Batch], tuple[State, Metrics, Params]]:
        """`StepBody.train` on global arrays."""
        state, stored = self.states.specs, self.states.stored
        trained = {n: spec for n, spec in state["params"].items() if not stored[n].info.frozen}
        return self._on_mesh(self.body.train, state, outs=(state, P(), trained))

    def _on_mesh(self, body: Callable, arrays: Any, *, outs: Any) -> Callable:
        """A method of the body as a function of global arrays, in any dict, and a batch.

        Args:
            body: the method.
            arrays: specs of the arrays.
            outs: specs of the results.
        """
        body = exact_products(body, self.config.model.dtype, self.mesh)
        batches = self.batches
        mapped = jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=(arrays, batches.specs),
            out_specs=outs,
            check_vma=True,
        )
        return lambda arrays, batch: mapped(dict(arrays), batches.checked(batch, batches.shapes))

    def _check_state(self, state: State) -> None:
        as_state(state, self.abstract_state)

    def _check_params(self, params: Params) -> None:
        as_state(params, self.abstract_state["params"], name="params")


# ---- programs, compiled in all processes together ------------------------------------------------


class Programs:
    """Compiles each jitted program of a run when it is first used, and tells the watchdog so."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog, self._alone = watchdog, coordination.is_alone()
        self._compiled: dict[str, Callable] = {}

    @contextlib.contextmanager
    def ready(self, name: str, program: Callable, *args: Any) -> Iterator[Callable]:
        """Yields the program, compiled, for one call with these arguments.

        Args:
            name: of the program in this run.
            program: jitted.
            args: what it will be called with; of the same shapes each time.
        """
        first = name not in self._compiled
        with self._watchdog.phase(Phase.COMPILING if first else Phase.WAITING):
            if first:  # a run places its batches itself
                jitted = program.jitted if isinstance(program, CompiledStep) else program
                if not self._alone:  # else the first call compiles
                    jitted = compile_together(name, jitted, *args)
                self._compiled[name] = jitted
            yield self._compiled[name]


def compile_together(name: str, program: Callable, *args: Any) -> Callable:
    """Compiles a jitted program for these arguments, and waits until all processes have done so.

    Without that, the process that runs it first would wait for the others to compile it, and gloo
    waits for 30 s only.
    """
    compiled = program.lower(*args).compile()  # type: ignore[attr-defined]
    coordination.barrier(f"compile.{name}", seconds=coordination.DAY)
    return compiled
