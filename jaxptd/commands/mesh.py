"""`jaxptd mesh`: draws the mesh of a layout and lists its rank groups."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxptd import plot
from jaxptd.commands.run_options import add_config, named_config
from jaxptd.common_options import add_words, picture_path
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.layout import Axis, Layout
from jaxptd.mesh import MAX_WORLD_SIZE, Groups, draw, draw_links, nodes_of, rank_groups


def main(argv: Sequence[str] | None = None) -> None:
    """Draws where each device sits in a layout, and lists the rank groups of every axis."""
    args = parser().parse_args(argv)
    sizes = {str(axis): getattr(args, axis) for axis in Axis}
    config = named_config(args)
    layout = _layout_of(args.world_size, sizes, config.layout if config else None)
    groups = rank_groups(layout, split_rank=args.split_rank)
    if args.node is not None:
        groups["node"] = nodes_of(layout, args.node)
    if picture := picture_path(args.picture):
        plot.save(plot.mesh(layout, node=args.node), picture)
    text = _text(layout, groups, node=args.node, quiet=args.quiet)
    print(json.dumps(groups) if args.json else text)


def parser() -> Parser:
    """Makes the parser of this command."""
    examples = (
        "jaxptd mesh --world-size 16 --tp 2 --pp 4",
        "jaxptd mesh --config quickstart",
        "jaxptd mesh --world-size 64 --tp 8 --pp 2 --node 8",
        "jaxptd mesh --run-dir runs/quickstart --world-size 64 --json",
    )
    parser = Parser(prog="jaxptd mesh", description=main.__doc__, examples=examples)
    help_text = "number of devices; default: the config's"
    parser.add_argument("--world-size", type=int, metavar="N", help=help_text)
    for axis in Axis:
        rest = "default: whatever the other sizes leave" if axis is Axis.DP else "default: 1"
        parser.add_argument(f"--{axis}", f"--layout.{axis}", type=int, metavar="N", help=rest)
    node_help = "devices that NVLink joins, as in jaxptd plan; shows which axes leave them"
    parser.add_argument("--node", type=int, metavar="N", help=node_help)
    split_help = "encoder-decoder models: the decoder's first stage"
    parser.add_argument("--split-rank", type=int, metavar="N", help=split_help)
    add_config(parser)
    quiet = "print the groups without the drawing"
    add_words(parser, json="the groups", quiet=quiet, picture="the mesh")
    return parser


def _layout_of(world_size: int | None, sizes: dict[str, int | None], base: Layout | None) -> Layout:
    """A layout of this many devices; dp, unless given, is what the other sizes leave.

    Args:
        world_size: number of devices. None takes that of `base`.
        sizes: axis -> size. None takes that of `base`, or 1.
        base: the layout of a config. None where there is no config.
    """
    given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    layout = dataclasses.replace(base or Layout(), **given)
    if world_size is None and base is None:
        raise UserError("--world-size is required; or name a config with --config F or --run-dir D")
    world_size = layout.num_devices if world_size is None else world_size
    if "dp" not in given:
        layout = dataclasses.replace(layout, dp=1)
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise UserError(f"world size {world_size}: use 1 to {MAX_WORLD_SIZE} devices")
    rest, remainder = divmod(world_size, layout.num_devices)
    if "dp" not in given and remainder == 0:
        return dataclasses.replace(layout, dp=rest)
    if world_size != layout.num_devices:
        product = " x ".join(f"{name}={size}" for name, size in given.items())
        remedy = f"use a multiple of {layout.num_devices}, or other sizes"
        if "dp" in given:
            remedy = f"use world size {layout.num_devices}, or leave --dp out"
        raise UserError(f"world size {world_size} does not split into {product}; {remedy}")
    return layout


def _text(layout: Layout, groups: Mapping[str, Groups], *, node: int | None, quiet: bool) -> str:
    head = [] if quiet else [f"{layout.num_devices} devices: {layout}", "", draw(layout), ""]
    if node is not None and not quiet:
        head += [draw_links(layout, node), ""]
    lines = (
        f"{name}: " + " ".join(f"[{','.join(map(str, group))}]" for group in each)
        for name, each in groups.items()
    )
    return "\n".join([*head, *lines])


if __name__ == "__main__":
    run_command(main)
