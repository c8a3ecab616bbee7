"""Compiles the best layouts of a ranking, and ranks them again."""

import collections
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from jaxptd.analysis.peak import outside
from jaxptd.config import Config
from jaxptd.display import gib_text
from jaxptd.errors import UserError
from jaxptd.hardware import Cluster
from jaxptd.planner.own.compiled import Compiled, Figures, remade
from jaxptd.planner.own.step import OwnStep, Predictor
from jaxptd.planner.search.best import Candidate

MOST = 100  # layouts that may be compiled
Measure = Callable[[Config, int], Figures]  # of a config, with so many bytes on each GPU


@dataclasses.dataclass(frozen=True)
class Compiling:
    """Compiles candidates until enough of them fit.

    Args:
        measure: compiles one.
        cluster: the devices.
        limit: bytes of a device that a step may use.
        say: takes a line for each that was compiled.
    """

    measure: Measure
    cluster: Cluster
    limit: float
    say: Callable[[str], None]

    def best(self, ranking: Iterable[Candidate], wanted: int) -> tuple[Candidate, ...]:
        """Compiles the first of a ranking that fit, by what the compiler says, the fastest first.

        As many are compiled at a time as there are cores.

        Args:
            ranking: the best by prediction first.
            wanted: how many have to fit.
        """
        found: list[Candidate] = []
        for number, (each, figures) in enumerate(self._compiled(iter(ranking), wanted, found), 1):
            words = f"compiled {number}: {each.config.layout}: "
            try:
                made = self._made(each, figures.result())
            except UserError as error:
                self.say(f"{words}dropped, {error}")
                continue
            known = f"{gib_text(made.bytes)} a device, {made.step.seconds:.3f} s a step"
            if made.bytes > self.limit:
                self.say(f"{words}dropped, {known}: the limit is {gib_text(self.limit)}")
                continue
            self.say(f"{words}{known}")
            found.append(dataclasses.replace(each, compiled=made))
        return tuple(sorted(found, key=lambda each: each.seconds))

    def _compiled(
        self, ranking: Iterator[Candidate], wanted: int, found: list[Candidate]
    ) -> Iterator[tuple[Candidate, "Future[Figures]"]]:
        """Yields candidates in their order, until so many are found; none in vain."""
        waiting: collections.deque[tuple[Candidate, Future[Figures]]] = collections.deque()
        pool = ThreadPoolExecutor(min(wanted, os.cpu_count() or 1))
        memory = int(self.cluster.accelerator.hbm_bytes)
        try:
            while len(found) < wanted:
                while len(found) + len(waiting) < wanted and (each := next(ranking, None)):
                    waiting.append((each, pool.submit(self.measure, each.config, memory)))
                if not waiting:
                    return
                yield waiting.popleft()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _made(self, candidate: Candidate, figures: Figures) -> Compiled:
        alone = Predictor(self.cluster, hiding=False)(OwnStep(candidate.config))
        others = sum(each.bytes for each in outside(candidate.config.layout))
        step = remade(candidate.step, alone, figures)
        return Compiled(figures, figures.bytes + others, step)
