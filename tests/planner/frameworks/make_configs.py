"""Writes configs of many layouts of every framework into a folder, for `read_configs.py`.

PYTHONPATH=.:tests/helpers python tests/planner/frameworks/make_configs.py FOLDER
"""

import random
import sys
from pathlib import Path

from framework_layouts import MODELS, takes, workload

from jaxptd.planner.frameworks.planning import FRAMEWORKS
from jaxptd.planner.frameworks.search import setups

OF_EACH = 12  # layouts per model


def write(folder: Path, of_each: int = OF_EACH) -> list[Path]:
    """Writes this many random layouts of each model; file names include the number of GPUs."""
    draw, paths = random.Random(0), []
    for name, framework in FRAMEWORKS.items():
        for number, (config, overrides, gpus) in enumerate(MODELS):
            load = workload(config, overrides, gpus)
            if not takes(framework, load):
                continue
            every = [setup for family in setups(framework, load) for setup in family]
            for one, setup in enumerate(draw.sample(every, min(of_each, len(every)))):
                path = folder / f"{name}-{config}-{number}-{one}-{gpus}{framework.suffix}"
                path.write_text(framework.write(load, setup).text)
                paths.append(path)
    return paths


if __name__ == "__main__":
    print(f"{len(write(Path(sys.argv[1])))} configs")
