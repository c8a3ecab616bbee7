"""All processes stop after the same step, no matter which one is asked, and when."""

import random
import signal
import threading
from collections.abc import Iterator

import pytest

from jaxptd.distributed import stop as module
from jaxptd.distributed.stop import Stop


class Service:
    """Fakes the coordination service's values in this process; the first write counts."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def put_first(self, folder: str, value: str) -> str:
        return self.values.setdefault(folder, value)

    def get_first(self, folder: str) -> str | None:
        return self.values.get(folder)

    def barrier(self, name: str) -> None:
        pass


@pytest.fixture
def service(monkeypatch):
    service = Service()
    for name in ("put_first", "get_first", "barrier"):
        monkeypatch.setattr(module.coordination, name, getattr(service, name))
    return service


def loop(stop: Stop, started: list[int], rank: int, *, steps: int) -> Iterator[int | None]:
    """Imitates the trainer's loop; yields wherever other processes may run.

    Starts step s, waits until step s - 1 ends because all have started it, reads the stop step.
    """
    for step in range(1, steps + 1):
        started[rank] = step
        yield None
        while min(started) < step - 1:
            yield None
        if stop.after(step):
            yield step
            return
    yield steps


def run(seed: int, *, count: int, steps: int, asked: int) -> tuple[list[int], int]:
    """Runs processes in random order; returns the steps they stop after and the first one asked."""
    choose = random.Random(seed)
    stops, started = [Stop(alone=False) for _ in range(count)], [0] * count
    loops = [loop(each, started, rank, steps=steps) for rank, each in enumerate(stops)]
    ends: dict[int, int] = {}
    first = steps
    for _ in range(2000):
        rank = choose.choice([r for r in range(count) if r not in ends])
        if started[rank] >= asked and choose.random() < 0.5:
            first = min(first, max(started))
            stops[rank].asked = True
        if end := next(loops[rank]):
            ends[rank] = end
            started[rank] = steps + 1  # it starts no further step, and no process waits for it
        if len(ends) == count:
            assert len({each.asked_anywhere() for each in stops}) == 1
            return [ends[r] for r in range(count)], first
    raise AssertionError(f"a deadlock: {started}")


@pytest.mark.parametrize("count", [2, 3, 5])
def test_in_any_order_all_stop_after_the_same_step_and_soon(service, count):
    for seed in range(300):
        service.values.clear()
        ends, first = run(seed, count=count, steps=12, asked=5)
        assert len(set(ends)) == 1, (seed, ends)
        assert 5 <= ends[0] <= first + 3


def test_one_step_ahead_would_be_too_late_for_some(service, monkeypatch):
    monkeypatch.setattr(module, "AHEAD", 1)
    with pytest.raises((RuntimeError, AssertionError)):
        test_in_any_order_all_stop_after_the_same_step_and_soon(service, 3)


def test_the_first_word_counts_and_a_late_one_is_a_bug(service):
    first, second = Stop(alone=False), Stop(alone=False)
    first.asked = second.asked = True
    assert [first.after(7), second.after(8)] == [False, False]
    assert [first.after(8), second.after(9), first.after(9)] == [False, True, True]
    late = Stop(alone=False)
    with pytest.raises(RuntimeError, match="stop after step 9 was read in step 10"):
        late.after(10)


@pytest.mark.parametrize("number", module.SIGNALS)
def test_all_processes_end_with_the_code_of_the_signal(service, number):
    first, second = Stop(alone=False), Stop(alone=False)
    with first.listening():
        signal.raise_signal(number)
    assert not first.after(3)
    assert [each.after(5) for each in (first, second)] == [True, True]
    assert [each.asked_anywhere() for each in (first, second)] == [True, True]
    assert [each.exit_code for each in (first, second)] == [128 + number] * 2


def test_a_signal_after_the_last_step_is_known_to_all_as_well(service):
    first, second = Stop(alone=False), Stop(alone=False)
    with first.listening():
        signal.raise_signal(signal.SIGTERM)
    assert [each.asked_anywhere() for each in (first, second)] == [True, True]
    assert [each.exit_code for each in (first, second)] == [143, 143]


def test_nobody_asked_is_exit_code_0(service):
    stop = Stop(alone=False)
    assert not stop.asked_anywhere()
    assert stop.exit_code == Stop().exit_code == 0


def test_the_first_signal_is_said_once():
    said = []
    stop = Stop(on_asked=lambda: said.append(True))
    with stop.watching(), stop.listening(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        signal.raise_signal(signal.SIGINT)
    assert said == [True]


def test_another_thread_than_the_main_one_takes_no_signals():
    before = signal.getsignal(signal.SIGINT)

    def listen() -> None:
        with Stop().watching(), Stop().listening():
            assert signal.getsignal(signal.SIGINT) == before

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()


def test_alone_it_stops_at_once():
    stop = Stop()
    assert not stop.after(3)
    stop.asked = True
    assert stop.after(4)
    assert stop.asked_anywhere()


def test_the_signals_are_those_of_people_schedulers_and_terminals():
    names = {number.name for number in module.SIGNALS}
    assert names == {"SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"}


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_request_may_come_again_and_sigterm_after_it_ends_nothing_at_once(number):
    """Closing a terminal sends SIGHUP twice; Slurm sends SIGTERM after its warning signal."""
    ended, said = [], []
    stop = Stop(end=ended.append, on_asked=lambda: said.append(True))
    with stop.watching(), stop.listening():
        for each in (number, number, signal.SIGTERM, number):
            signal.raise_signal(each)
    assert stop.exit_code == 128 + number  # the first signal's
    assert (ended, said) == ([], [True])


def test_a_second_sigterm_ends_the_process_also_after_a_warning(monkeypatch):
    monkeypatch.setattr(module, "ANSWER", 0)
    taken, ended = [], []
    before = signal.signal(signal.SIGTERM, lambda number, _: taken.append(number))
    try:
        stop = Stop(end=ended.append)
        with stop.watching(), stop.listening():
            for each in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
                signal.raise_signal(each)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert taken == [signal.SIGTERM]
    assert stop.exit_code == 138


def test_a_signal_that_another_process_got_first_gives_the_exit_code(service):
    first, second = Stop(alone=False), Stop(alone=False)
    with first.listening():
        signal.raise_signal(signal.SIGUSR1)
    with second.listening():
        assert not any(each.after(3) for each in (first, second))
        signal.raise_signal(signal.SIGTERM)
    assert [each.exit_code for each in (first, second)] == [138, 138]


def test_under_nohup_sighup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = Stop()
        with stop.listening():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_afterwards_every_signal_does_what_it_did():
    before = [signal.getsignal(number) for number in module.SIGNALS]
    with Stop().listening():
        assert all(signal.getsignal(number) != signal.SIG_DFL for number in module.SIGNALS)
    assert [signal.getsignal(number) for number in module.SIGNALS] == before
