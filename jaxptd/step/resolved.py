"""A config's open choices, made once for the devices of a mesh.

A config says `attention: auto` or leaves a schedule's plan to be computed. `resolve` decides, and
everything in a step reads the same record of decisions.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jaxptd.config import Config, Kernels, ModelConfig
from jaxptd.errors import UserError
from jaxptd.layers.attention import choose_kernel
from jaxptd.layers.for_layout import for_decoding, make_tensor_parallel
from jaxptd.layers.fp8 import choose_precision
from jaxptd.layers.megatron import GatheringAgain1D, TensorParallel1D
from jaxptd.layers.tensor_parallel import TensorParallel
from jaxptd.models.families import family_of
from jaxptd.models.family import Family
from jaxptd.models.model import Model
from jaxptd.models.stages import StagePlacement, make_plan
from jaxptd.params import Blueprint, ParamInfo, Stored
from jaxptd.pipeline import pools
from jaxptd.pipeline.plan import Plan
from jaxptd.step.optimizer import make_optimizer
from jaxptd.zero.zero import Zero


@dataclasses.dataclass(frozen=True)
class ResolvedConfig:
    """A config with its choices made for one mesh; everything else here follows from the fields.

    Args:
        config: as given.
        model: the config's model, its kernels chosen, its sequences padded.
        attention_obstacle: why cuDNN cannot be used, if it cannot.
        tensor_parallel: how layers hold their matrices.
        plan: of the pipeline; None without one.
        placement: a parameter's info without a pipeline -> its info on the stages.
    """

    config: Config
    model: ModelConfig
    attention_obstacle: str | None
    tensor_parallel: TensorParallel
    plan: Plan | None
    placement: Callable[[ParamInfo], ParamInfo]

    @cached_property
    def family(self) -> Family:
        """The row of the model's family: its batches, losses and parts."""
        return family_of(self.model)

    @cached_property
    def blueprint(self) -> Blueprint:
        """The model and its parameters."""
        offload = "activations" in self.config.layout.offloaded

        def make(key: Array) -> Model:
            rngs = nnx.Rngs(key)
            return self.family.make(
                self.model, tensor_parallel=self.tensor_parallel, rngs=rngs, offload=offload
            )

        return Blueprint(make, self.placement)

    @property
    def infos(self) -> dict[str, ParamInfo]:
        """Shapes and shardings of the parameters, as layers hold them."""
        return self.blueprint.infos

    @cached_property
    def zero(self) -> Zero:
        """Shards the state over data parallel devices, if the layout asks for it."""
        return Zero.of(self.config, self.infos)

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """Shapes and shardings of the parameters, as the state holds them."""
        return self.zero.stored

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return make_optimizer(self.config.optimizer, self.stored)

    @cached_property
    def master_dtype(self) -> Any:
        """The precision of the state's parameters, of sums of gradients and of the optimizer."""
        return jnp.promote_types(self.model.dtype, jnp.float32)

    @property
    def trips(self) -> Mapping[str, int]:
        """Executions on all stages, by scope, of loops whose length XLA does not know."""
        plan, many = self.zero.layers, self.config.train.micro_batches
        all_of_them = plan.joins_trips and plan.accumulate == "in_loop"
        single = plan.gather == "first_microbatch" and many > 1
        trips = {pools.APART: many if all_of_them else 1} if all_of_them or single else {}
        return self.plan.trips if self.plan else trips


def resolve(config: Config, mesh: Mesh) -> ResolvedConfig:
    """Makes a config's open choices for the devices of a mesh.

    Raises:
        UserError: the config asks for what these devices do not have, or for no pipeline schedule.
    """
    layout, device = config.layout, mesh.devices.flat[0]
    documents = family_of(config.model).has_documents(config)
    kernel, obstacle = choose_kernel(config, device, documents=documents)
    precision = choose_precision(config.model.products, device)
    plan = make_plan(config) if layout.pp > 1 else None
    return ResolvedConfig(
        config=config,
        model=dataclasses.replace(
            config.padded_model, attention=kernel, kernels=choose_kernels(config, device)
        ),
        attention_obstacle=obstacle,
        tensor_parallel=make_tensor_parallel(
            layout, precision=precision, whole=_whole_products(config)
        ),
        plan=plan,
        placement=StagePlacement(plan, layout.sizes) if plan else _as_it_is,
    )


def choose_kernels(config: Config, device: Any) -> Kernels:
    """The kernels that `model.kernels` selects on a device: xla or triton.

    Raises:
        UserError: `triton` is requested where it cannot run.
    """
    model, capability = config.model, float(getattr(device, "compute_capability", 9.0))
    able = device.platform == "gpu" and capability >= 8
    missing = "" if able else "it needs an NVIDIA GPU of compute capability 8.0 or more"
    missing = "it computes in float32" if model.dtype == "float64" else missing
    if model.kernels == "triton" and missing:
        raise UserError(f"model.kernels=triton: {missing}; use model.kernels=xla")
    return "xla" if missing else config.kernels_on_gpus


def _whole_products(config: Config) -> Callable[..., TensorParallel1D]:
    """Makes the class of whole products, as backward keeps what they take or gathers it again."""
    if config.gathers_again:
        return partial(GatheringAgain1D, scanned=config.model.scan_layers)
    return TensorParallel1D


def resolve_for_decoding(config: Config, mesh: Mesh) -> ResolvedConfig:
    """Makes the choices of a config for one sequence, no token of which is sharded."""
    model, layout = dataclasses.replace(config.model, remat="none"), config.layout
    if "activations" in layout.offloaded:  # nothing is kept
        others: Any = tuple(layout.offloaded - {"activations"})
        layout = dataclasses.replace(layout, offload=others)
    resolved = resolve(dataclasses.replace(config, model=model, layout=layout), mesh)
    chosen = resolved.model
    unpadded = dataclasses.replace(model, attention=chosen.attention, kernels=chosen.kernels)
    return dataclasses.replace(resolved, model=unpadded, tensor_parallel=for_decoding(layout))


def _as_it_is(info: ParamInfo) -> ParamInfo:
    return info
