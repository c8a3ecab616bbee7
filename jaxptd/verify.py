"""Any layout against one device: one training step of the real model, tensor by tensor.

`python -m jaxptd.verify --config F [overrides]` runs the step in float64 and in float32 on the
layout and on one device, from the same parameters and batch, and compares loss, gradient norm,
every gradient and every updated parameter in canonical form. If the config computes in bfloat16,
then in that, too, with the attention kernel that it trains with, against float32 on one device;
products are native, also where it trains in fp8. Exit code 0: equal; 1: not, and the first wrong
tensor (in the order of backward) is named.

Source of the method: TTrace, arXiv 2506.09280; the tolerance is `comparison.py`'s.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxptd.analysis.comparison import Outcome, Row, Tensors, backward_order, compare
from jaxptd.config import Config, Dtype
from jaxptd.config.command_line import make_parser, parse
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.errors import run_command
from jaxptd.layers.attention import choose_kernel
from jaxptd.mesh import Layout, make_mesh
from jaxptd.params import Params, shardings
from jaxptd.run.devices import prepare
from jaxptd.step import Batch, Program, batch_fields

EXACT: Mapping[Dtype, Dtype] = {"bfloat16": "float32"}  # what is held against another precision
IGNORED = -1
DOCUMENT_ENDS = 0.2  # share of tokens after which a new document begins


@dataclasses.dataclass(frozen=True)
class Report:
    """All comparisons of a layout in one precision, in the order of backward."""

    layout: Layout
    dtype: Dtype
    rows: list[Row]

    @property
    def wrong(self) -> list[Row]:
        return [row for row in self.rows if not row.equal]

    @property
    def worst_gradient(self) -> float:
        """The largest relative difference of any gradient."""
        return max(row.error for row in self.rows if row.what == "gradient")

    @property
    def how(self) -> str:
        """The precision, and that of the one device, if it is another."""
        other = f", which computes in {EXACT[self.dtype]}" if self.dtype in EXACT else ""
        return f"in {self.dtype}{other}"

    @property
    def verdict(self) -> str:
        if not self.wrong:
            return f"equal to one device {self.how}: gradients to {self.worst_gradient:.1e}"
        first = self.wrong[0]
        return (
            f"NOT equal to one device {self.how}: {len(self.wrong)} of {len(self.rows)} "
            f"comparisons; first {first.what} {first.name}, off by {first.error:.2e}, "
            f"allowed {first.allowed:.2e}"
        )


def verify(config: Config, *, dtype: Dtype) -> Report:
    """Holds one step of `config` on its layout against one device, computing in `dtype`.

    Args:
        config: model.vocab_size must be set; JAX must have the layout's devices.
        dtype: float32, float64 (needs jax_enable_x64), or bfloat16, which is held against float32.
    """
    optimizer = dataclasses.replace(config.optimizer, skip_above=0.0)  # or nothing is updated
    config = _in(dtype, dataclasses.replace(config, optimizer=optimizer))
    single = _in(EXACT.get(dtype, dtype), dataclasses.replace(config, layout=Layout()))
    reference = Bench(Program(single, make_mesh(single.layout)))
    start = reference.parameters()
    eps = float(jnp.finfo(dtype).eps)
    expected = reference.run(start)
    rounded = reference.run(_perturbed(start, eps))
    found = Bench(Program(config, make_mesh(config.layout))).run(start)
    rows = list(compare(expected, rounded, found, config=config.optimizer, eps=eps))
    return Report(
        config.layout,
        dtype,
        sorted(rows, key=lambda row: backward_order(row, config.model.num_layers)),
    )


def _in(dtype: Dtype, config: Config) -> Config:
    """The config with products in `dtype`, and an attention kernel that has it."""
    model = dataclasses.replace(config.model, dtype=dtype, products="native")
    if model.attention == "cudnn" and dtype not in EXACT:
        model = dataclasses.replace(model, attention="auto")
    return dataclasses.replace(config, model=model)


@dataclasses.dataclass(frozen=True)
class Bench:
    """Runs single steps of a program from canonical parameters."""

    program: Program

    def parameters(self) -> Tensors:
        """Initial parameters, every one moved a little, so that biases and norms matter too."""
        params = self.program.canonical(self.program.init_state()["params"])
        return {
            name: np.asarray(p) + _noise(name, p.shape).astype(p.dtype)
            for name, p in params.items()
        }

    @cached_property
    def batch(self) -> Batch:
        """Random tokens; some targets count for nothing, more on some devices than on others."""
        config = self.program.config
        rng = np.random.default_rng(config.train.seed)
        shape = (config.train.global_batch_size, config.model.seq_length + 1)
        rows = rng.integers(0, config.model.vocab_size, shape).astype(np.int32)
        targets = np.where(
            rng.random((shape[0], shape[1] - 1)) < rng.random((shape[0], 1)) / 2,
            IGNORED,
            rows[:, 1:],
        )
        ends = rng.random(targets.shape) < DOCUMENT_ENDS
        batch = {"tokens": rows[:, :-1], "targets": targets, "segments": ends.cumsum(1)}
        return self.program.place(
            {name: batch[name].astype(np.int32) for name in batch_fields(config)}
        )

    def run(self, params: Tensors) -> Outcome:
        state = self.program.init_state()
        held = jax.jit(self._held)(params)
        held = jax.device_put(held, shardings(self.program.stored, self.program.mesh))
        state, metrics, grads = self.program.step_with_gradients(
            {**state, "params": held}, self.batch
        )
        return Outcome(
            loss=float(metrics["loss"]),
            grad_norm=float(metrics["grad_norm"]),
            learning_rate=float(metrics["learning_rate"]),
            gradients=self._by_layer(grads),
            parameters=self._by_layer(state["params"]),
        )

    def _held(self, params: Tensors) -> Params:
        return {name: self.program.stored[name].pad(p) for name, p in params.items()}

    def _by_layer(self, tensors: Mapping[str, jax.Array]) -> Tensors:
        """Canonical, stacked layers taken apart: `blocks.mlp.up.w` -> `blocks.0.mlp.up.w`, ..."""
        result: Tensors = {}
        for name, x in jax.jit(self.program.canonical)(tensors).items():
            root, _, rest = name.partition(".")
            if root == "blocks":
                result |= {
                    f"blocks.{layer}.{rest}": part for layer, part in enumerate(np.asarray(x))
                }
            else:
                result[name] = np.asarray(x)
        return result


def _noise(name: str, shape: Sequence[int]) -> np.ndarray:
    return 0.02 * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(
        np.float32
    )


def _perturbed(params: Tensors, eps: float) -> Tensors:
    """Every element changed by one rounding error, up or down."""
    rng = np.random.default_rng(1)
    return {
        name: p * (1 + eps * rng.choice([-1, 1], p.shape)).astype(p.dtype)
        for name, p in params.items()
    }


def _table(report: Report) -> Table:
    table = Table(
        "tensor",
        "what",
        "difference",
        "allowed",
        "",
        title=f"{report.layout}, {report.dtype}, against one device",
    )
    for row in report.rows:
        mark = "" if row.equal else "[red]WRONG[/red]"
        table.add_row(row.name, row.what, f"{row.error:.2e}", f"{row.allowed:.2e}", mark)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Proves that a layout computes what one device computes: exit code 0 equal, 1 not."""
    parser = make_parser("python -m jaxptd.verify", main.__doc__ or "")
    parser.add_argument("--quiet", action="store_true", help="print the verdicts only")
    config, options = parse(parser, argv)
    config = with_vocabulary(config)
    console = Console()
    console.print(f"verify {config.layout} on {prepare(config, double=True)}", highlight=False)
    choose_kernel(config, jax.devices()[0])  # or the last precision would refuse, after the others
    equal = True
    precisions: tuple[Dtype, ...] = ("float64", "float32")
    if config.model.dtype in EXACT:
        precisions += (config.model.dtype,)
    for dtype in precisions:
        report = verify(config, dtype=dtype)
        if not options["quiet"] or report.wrong:
            console.print(_table(report))
        console.print(
            report.verdict, highlight=False, style="green" if not report.wrong else "bold red"
        )
        equal &= not report.wrong
    return 0 if equal else 1


if __name__ == "__main__":
    run_command(main)
