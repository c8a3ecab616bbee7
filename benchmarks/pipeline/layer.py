"""Times a layer's forward, and the two halves of its backward: the operations of a tick.

Each is compiled separately and gets its kept values from memory, as in the executor's loops.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxptd.analysis.compiled_step import random_batch
from jaxptd.collectives import as_varying, varying_axes
from jaxptd.config import Config
from jaxptd.mesh import BATCH_AXES, Axis, make_mesh
from jaxptd.models.stages import make_plan
from jaxptd.params import Params
from jaxptd.pipeline import pools
from jaxptd.pipeline.pools import LayerInputs
from jaxptd.pipeline.split_backward import trace_layer
from jaxptd.pipeline.statistics import Durations
from jaxptd.step import Program
from jaxptd.step.batch import BATCH_SPEC
from jaxptd.step.pipelined import PipelineSchedule

Call = Callable[[], Any]


def calls(config: Config) -> dict[str, Call]:
    """Compiles a layer's forward, the two halves of its backward (now, then), and it whole.

    One micro-batch of `config`, whose layout has one device; its residual stream is random, and the
    gradient is the same.
    """
    program = Program(config, make_mesh(config.layout))
    params = program.init_state()["params"]
    layer = {name: x[0] for name, x in params.items() if program.infos[name].stack}
    batch = program.place(random_batch(config))
    shape = (1, *batch["tokens"].shape, config.model.hidden_size)
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), config.model.dtype)
    operations = {name: _Layer(program).alone(name) for name in ("forward", "now", "then", "whole")}
    _, kept = operations["forward"](layer, batch, x)
    _, passed = operations["now"](layer, batch, kept, x)
    arrays = {"forward": (x,), "now": (kept, x), "then": (kept, passed, x), "whole": (kept, x)}
    return {name: partial(call, layer, batch, *arrays[name]) for name, call in operations.items()}


def durations(calls: Mapping[str, Call], *, runs: int) -> tuple[Durations, float]:
    """Median seconds of F, B and W, and of the whole backward, of `calls`; timed in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(runs + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - begin)
    # The first run compiled.
    median = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    return Durations(median["forward"], median["now"], median["then"]), median["whole"]


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A layer's operations as functions of a device: (parameters, batch, arrays) -> arrays."""

    program: Program

    def alone(self, name: str) -> Callable:
        mesh = self.program.mesh
        every, cut = P(mesh.axis_names), P((Axis.PP, *BATCH_AXES))

        def run(layers: Params, batch: Any, *arrays: Any) -> Any:
            arrays = jax.tree.map(lambda x: x[0], arrays)
            results = getattr(self, name)(*self._arguments(layers, batch), *arrays)
            return jax.tree.map(lambda x: as_varying(x, mesh.axis_names)[None], results)

        def call(layers: Params, batch: Any, *arrays: Any) -> Any:
            specs = (P(), BATCH_SPEC, *(cut for _ in arrays))
            mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=every)
            return mapped(layers, batch, *arrays)

        return jax.jit(call)

    def _arguments(self, layers: Params, batch: Any) -> tuple[Any, LayerInputs]:
        micro, token_info = self.program.body.micro_batches(batch, None)
        vary = [Axis.PP, *BATCH_AXES]
        params = {name: as_varying(x, vary) for name, x in layers.items()}
        return params, LayerInputs(pools.get(micro, 0).token_info(token_info), jnp.int32(0))

    def _traced(self, params: Any, inputs: LayerInputs, x: Array) -> tuple[Any, list[Any]]:
        resolved = self.program.resolved
        plan = make_plan(resolved.config)
        passes = PipelineSchedule(resolved.blueprint, resolved.model, plan, resolved.zero)

        def run(params: Params, inputs: LayerInputs, x_BTD: Array) -> Array:
            return passes._layer("blocks", (params, {}), inputs, x_BTD)[0]

        return trace_layer(run, params, inputs, x)

    def _kept(self, shapes: Any, kept: Any) -> list[Array]:
        pairs = zip(shapes, kept, strict=True)
        return [as_varying(x, sorted(varying_axes(shape))) for shape, x in pairs]

    def forward(self, params: Any, inputs: LayerInputs, x: Array) -> tuple[Array, list[Array]]:
        return self._traced(params, inputs, x)[0].forward(params, inputs, x)

    def now(
        self, params: Any, inputs: LayerInputs, kept: Any, dy: Array
    ) -> tuple[Array, list[Array]]:
        layer, shapes = self._traced(params, inputs, dy)
        had = (self._kept(shapes, kept), params, inputs)
        return layer.split(*had, dy).input_backward(had, dy)

    def then(self, params: Any, inputs: LayerInputs, kept: Any, passed: Any, dy: Array) -> Any:
        layer, shapes = self._traced(params, inputs, dy)
        had = (self._kept(shapes, kept), params, inputs)
        split = layer.split(*had, dy)
        _, like = jax.eval_shape(split.input_backward, had, dy)
        return split.weight_backward(had, self._kept(like, passed))

    def whole(self, params: Any, inputs: LayerInputs, kept: Any, dy: Array) -> Any:
        layer, shapes = self._traced(params, inputs, dy)
        return layer.backward(self._kept(shapes, kept), params, inputs, dy)
