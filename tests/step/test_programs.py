"""A run's programs are compiled once, in a separate phase."""

from jaxptd.distributed.watchdog import Phase, Watchdog
from jaxptd.step.program import Programs


def test_only_the_first_call_compiles():
    watchdog, phases = Watchdog(40), []
    programs = Programs(watchdog)
    for name in ("train_step", "train_step", "eval_step"):
        with programs.ready(name, lambda: phases.append(watchdog.beat().phase)) as program:
            assert program() is None
    assert phases == [Phase.COMPILING, Phase.WAITING, Phase.COMPILING]
