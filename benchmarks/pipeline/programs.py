"""The programs that `benchmarks.pipeline` compares: jaxptd's, and GPipe by differentiating a scan.

The peer is what users of MaxText and praxis have: a scan over m+p-1 ticks in a `shard_map`. At each
tick every stage runs its layers on what the stage before sent at the last tick; `jax.grad`
differentiates the whole scan. The model's functions, optimizer and sums over devices are jaxptd's;
embeddings, with tied weights, are whole on every stage. All micro-batches are embedded before the
first tick, and go through the head after the last one, on the last stage only.

Letters: M or m micro-batches, p stages, B batch, T position, D model, V vocabulary, L layers.
"""

import dataclasses
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.lib.race import Runner
from jaxptd.analysis.compiled_step import CPU_OPTIONS, random_batch
from jaxptd.analysis.jaxprs import scans
from jaxptd.config import Config, ModelConfig, Remat, TrainConfig
from jaxptd.layers.dropout import TokenInfo
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.models.stages import Shape, StagePlacement
from jaxptd.params import Params
from jaxptd.pipeline import pools
from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.pools import LayerInputs
from jaxptd.remat import with_remat
from jaxptd.step import Program
from jaxptd.step.body import StepBody
from jaxptd.step.passes import LOSSES, Losses, MicroBatches, in_total
from jaxptd.step.pipelined import PipelineSchedule
from jaxptd.step.resolved import ResolvedConfig, resolve

PEER = "differentiated scan"
# With these sizes, gradients, weights and pools have shapes that nothing else has.
MODEL = ModelConfig(num_layers=8, hidden_size=128, num_heads=4, seq_length=64, vocab_size=640)
STAGES, SEQUENCES = 4, 4  # stages, and sequences of a micro-batch on a device


@dataclasses.dataclass(frozen=True)
class Scanned(PipelineSchedule):
    """GPipe with JAX's backward: every stage runs at every tick, on zeros at the ends."""

    def gradients(
        self, params: Params, micro: MicroBatches, token_info: TokenInfo, weights: Losses
    ) -> tuple[Losses, Params]:
        def loss(params: Params) -> tuple[Array, Losses]:
            return in_total(self._loss_of_all(params, micro, token_info), weights)

        (_, losses), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return losses, gradients

    def _loss_of_all(self, params: Params, micro: MicroBatches, token_info: TokenInfo) -> Losses:
        arrays = self._arrays(params, micro, token_info)
        outside = self.blueprint.build(arrays.ends)
        x_MBTD = lax.map(lambda m: outside.embed(m.batch, m.token_info(token_info)), micro)
        x_MBTD = self._stages(arrays.layers["blocks"], (token_info, micro), x_MBTD)

        def sums(each: tuple) -> Losses:
            x_BTD, micro = each
            return self._terms(LOSSES, token_info, outside, micro, x_BTD)

        def add(total: Losses, each: tuple) -> tuple[Losses, None]:
            return jax.tree.map(jnp.add, total, sums(each)), None

        first = pools.get((x_MBTD, micro), 0)
        zero = jax.tree.map(pools.zeros, jax.eval_shape(sums, first))
        last = lax.axis_index(Axis.PP) == self.plan.schedule.stages - 1
        return lax.cond(last, lambda: lax.scan(add, zero, (x_MBTD, micro))[0], lambda: zero)

    def _stages(
        self, layers: Params, tokens: tuple[TokenInfo, MicroBatches], x_MBTD: Array
    ) -> Array:
        """Takes x of every micro-batch through all stages; valid on the last stage only."""
        stage, stages = lax.axis_index(Axis.PP), self.plan.schedule.stages
        M, onward = len(x_MBTD), [(s, s + 1) for s in range(stages - 1)]
        token_info, micro = tokens

        def tick(x_BTD: Array, each: tuple) -> tuple[Array, Array]:
            first_BTD, t = each
            local = pools.get(micro, jnp.clip(t - stage, 0, M - 1))
            x_BTD = jnp.where(stage == 0, first_BTD, x_BTD)
            x_BTD = self._stage(layers, local.token_info(token_info), x_BTD)
            return lax.ppermute(x_BTD, Axis.PP, onward), x_BTD

        nothing = jnp.zeros_like(x_MBTD[: stages - 1])
        ticks = jnp.arange(M + stages - 1, dtype=jnp.int32)
        first = jnp.concatenate([x_MBTD, nothing])
        return lax.scan(tick, pools.zeros(x_MBTD[0]), (first, ticks))[1][stages - 1 :]

    def _stage(self, layers: Params, token_info: TokenInfo, x_BTD: Array) -> Array:
        """Runs a stage's layers; with remat full it keeps its input, and backward runs it again."""
        depth = self.plan.depth("blocks")
        whole = self.model.remat == "full"
        model = self.model
        remat = partial(with_remat, remat=model.remat, scanned=model.scan_layers)
        layer = partial(self._layer, "blocks")
        layer = layer if whole else remat(layer)
        begin = lax.axis_index(Axis.PP) * depth

        def run(layers: Params, token_info: TokenInfo, x_BTD: Array) -> Array:
            def one(x_BTD: Array, each: tuple) -> tuple[Array, None]:
                params, number = each
                return layer((params, {}), LayerInputs(token_info, begin + number), x_BTD)[0], None

            return lax.scan(one, x_BTD, (layers, jnp.arange(depth, dtype=jnp.int32)))[0]

        return (jax.checkpoint(run, prevent_cse=False) if whole else run)(layers, token_info, x_BTD)


class WholeEnds(StagePlacement):
    """Leaves parameters outside the layers whole on every stage."""

    def __call__(self, info: Shape) -> Shape:
        return super().__call__(info) if info.stack else info


class Peer(Program):
    """The step of a config whose schedule is gpipe, run by `Scanned`."""

    @cached_property
    def resolved(self) -> ResolvedConfig:
        resolved = resolve(self.config, self.mesh)
        placement = WholeEnds(_plan(resolved), self.config.layout.sizes)
        return dataclasses.replace(resolved, placement=placement)

    @cached_property
    def body(self) -> StepBody:
        resolved = self.resolved
        passes = Scanned(resolved.blueprint, resolved.model, _plan(resolved), resolved.zero)
        return StepBody(resolved, self.states, passes)


def _plan(resolved: ResolvedConfig) -> Plan:
    assert resolved.plan is not None, "a config without a pipeline"
    return resolved.plan


def program_of(name: str, remat: Remat, m: int, layout: Layout | None = None) -> Any:
    """Makes a step with m micro-batches of `SEQUENCES` on each device."""
    schedule = "gpipe" if name == PEER else name
    layout = layout or Layout(pp=STAGES, schedule=schedule)
    train = TrainConfig(
        global_batch_size=m * SEQUENCES * layout.dp, micro_batches=m, platform="cpu"
    )
    config = Config(model=dataclasses.replace(MODEL, remat=remat), layout=layout, train=train)
    return (Peer if name == PEER else Program)(config, make_mesh(layout))


def words() -> str:
    return (
        f"{MODEL.num_layers} layers, D={MODEL.hidden_size}, T={MODEL.seq_length}, "
        f"V={MODEL.vocab_size}, float32, micro-batches of {SEQUENCES} sequences on a device, "
        f"p={STAGES}."
    )


# ---- what a step holds ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pools:
    """Bytes that a device carries from tick to tick.

    Args:
        slots: of each pool.
        kept: for backward, and between its halves, in all slots of both.
        mail: activations and gradients that wait for their operation, in all slots.
    """

    slots: dict[str, int]
    kept: int
    mail: int


def pools_of(program: Program) -> Pools:
    """Reads the pools of a pipeline's step from its jaxpr."""
    plan, step = _plan(program.resolved), cast(Any, program.train_step)
    traced = step.trace(program.abstract_state, program.abstract_batch)
    ticks = plan.schedule.ticks
    scan = next(each for each in scans(traced.jaxpr.jaxpr) if each.params["length"] == ticks)
    _, mail, *rest = (var.aval for var in scan.outvars)  # as `executor.Carry` has them
    kept = rest[: -len(program.infos) - 1]  # less gradients of every parameter, and the loss
    return Pools(plan.slots, sum(map(_bytes, kept)), _bytes(mail))


def kept_by_a_layer(program: Program) -> int:
    """Bytes that a layer keeps of a micro-batch for its backward, float32, tp=1, by formula.

    4 B T times 16 D, four statistics of its norms, and a logsumexp for each head.
    """
    model = program.config.model
    return 4 * _tokens(program) * (16 * model.hidden_size + 4 + model.num_heads)


def kept_by_the_peer(program: Peer) -> int:
    """Bytes that the peer keeps, by formula: for every tick, idle ones too.

    With remat full a stage's input at every tick, and for one tick all that its layers keep.
    """
    depth, ticks = _plan(program.resolved).depth("blocks"), ticks_of_the_peer(program)
    if program.config.model.remat == "full":
        inputs = ticks * 4 * _tokens(program) * program.config.model.hidden_size
        return inputs + depth * kept_by_a_layer(program)
    return ticks * depth * kept_by_a_layer(program)


def ticks_of_the_peer(program: Program) -> int:
    """Trips of each of the peer's two loops over ticks."""
    schedule = _plan(program.resolved).schedule
    return schedule.micro_batches + schedule.stages - 1


def _tokens(program: Program) -> int:
    """Tokens of a micro-batch on a device."""
    train, layout = program.config.train, program.config.layout
    sequences = train.global_batch_size // (layout.dp * train.micro_batches)
    return sequences * program.config.model.seq_length


def _bytes(x: Any) -> int:
    return x.size * x.dtype.itemsize


# ---- what runs ------------------------------------------------------------------------------


class Named(NamedTuple):
    """A program with a name."""

    name: str
    program: Program


class Step(Runner):
    """A step, whose results are its loss and gradients in canonical form."""

    def step(self) -> list[Any]:
        _, metrics, gradients = super().step()
        host: Any = {name: np.asarray(x) for name, x in gradients.items()}
        return [
            metrics["loss"],
            *self.program.program.resolved.blueprint.to_canonical(host).values(),
        ]


def start(named: Named) -> Step:
    """Compiles a program, with its state and the same batch as all others."""
    program = named.program
    step: Any = program.step_with_gradients
    lowered = step.lower(program.abstract_state, program.abstract_batch)
    compiled = lowered.compile(compiler_options=CPU_OPTIONS)
    return Step(
        named, compiled, (program.init_state(), program.place(random_batch(program.config)))
    )
