"""Trains on nodes of a Ray cluster, one process on each.

    ray job submit --working-dir . -- python ray_train.py --nodes 4 --gpus 8 -- \
        --config gpt2-1.5b --layout.dp 4 --layout.tp 8 --train.run_dir /runs/pretrain

What follows the second `--` are options of `jaxptd train`. If a process or a node dies, all start
again and resume from the last checkpoint. Bad input (2) and a bug (1) end the job at once.
"""

import argparse
import subprocess
import sys

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PORT = 55527  # where the first process listens; free on its node
DIED, FINAL = 3, (0, 1, 2)  # exit codes: as if another process had died; those that end the job


@ray.remote(max_retries=0)
def address() -> str:
    """The address of the node that this runs on."""
    return get_node_ip_address()


@ray.remote(max_retries=0)
def train(options: list[str]) -> int:
    """Trains in a process of its own, with the GPUs that Ray has given; its exit code."""
    return subprocess.run([sys.executable, "-m", "jaxptd.train", *options]).returncode


def attempt(options: list[str], nodes: int, gpus: int, group) -> int:
    """Starts a process on every node and waits for all; the first exit code that is not 0."""

    def on(rank: int, task, **resources):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        return task.options(scheduling_strategy=place, **resources)

    codes, running = [], []
    try:
        host = ray.get(on(0, address, num_cpus=0).remote())
        for rank in range(nodes):
            own = [f"--processes.coordinator={host}:{PORT}"]
            own += [f"--processes.count={nodes}", f"--processes.id={rank}"]
            running.append(on(rank, train, num_cpus=1, num_gpus=gpus).remote([*options, *own]))
    except ray.exceptions.RayError:  # the first node has died
        codes.append(DIED)
    for task in running:
        try:
            codes.append(ray.get(task))
        except ray.exceptions.RayError:  # its node has died
            codes.append(DIED)
    return next(filter(None, codes), 0)


def main() -> int:
    """Starts the processes again until they end by themselves; the last exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True, help="of a node")
    parser.add_argument("--restarts", type=int, default=100)
    parser.add_argument("options", nargs="+", help="of jaxptd train, behind `--`")
    args = parser.parse_args()
    ray.init()
    bundles = [{"CPU": 1, "GPU": args.gpus}] * args.nodes
    group = placement_group(bundles, strategy="STRICT_SPREAD")  # each on another node
    ray.get(group.ready())  # Ray moves a bundle to another node when its node dies
    for number in range(args.restarts + 1):
        code = attempt(args.options, args.nodes, args.gpus, group)
        if code in FINAL:
            return code
        print(f"attempt {number + 1} ended with exit code {code}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
