"""When an engine counts as stalled: work is outstanding and no step comes. With a clock that the test moves."""

import pytest

from scoring.progress import ProgressMeter

TICK = 0.25


class Engine:
    """A meter, and the time in which it is looked at."""

    def __init__(self) -> None:
        self.time = 100.0
        self.meter = ProgressMeter(clock=lambda: self.time)

    def wait(self, seconds: float) -> None:
        """Let time pass, looking at the meter four times a second."""
        for _ in range(round(seconds / TICK)):
            self.time += TICK
            self.meter.look(1.0)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_an_engine_with_work_and_without_steps_is_stalled_after_ten_seconds(engine):
    engine.meter.take(5)
    engine.wait(10)
    assert not engine.meter.stalled
    engine.wait(TICK)
    assert engine.meter.stalled
    assert engine.meter.silent_s == 10.25
    engine.meter.step()
    assert not engine.meter.stalled


def test_an_idle_engine_is_never_stalled(engine):
    engine.wait(3600)
    assert not engine.meter.stalled
    settle = engine.meter.take(5)
    engine.wait(9)
    settle()
    engine.wait(3600)
    engine.meter.take(5)
    engine.wait(9)
    assert not engine.meter.stalled


def test_an_engine_that_steps_is_never_stalled_however_long_its_work_takes(engine):
    engine.meter.take(10**6)
    for _ in range(100):
        engine.wait(9)
        engine.meter.step()
        assert not engine.meter.stalled
    assert engine.meter.now().steps == 100


def test_an_engine_of_long_steps_is_given_five_of_them(engine):
    engine.meter.patience_s = 60
    engine.meter.take(5)
    engine.wait(20)
    engine.meter.step()
    engine.wait(100)
    assert not engine.meter.stalled
    engine.wait(TICK)
    assert engine.meter.stalled


def test_an_engine_whose_full_steps_are_known_to_be_long_is_given_five_of_them(engine):
    engine.meter.expect_step(20)
    engine.meter.take(5)
    engine.wait(100)
    assert not engine.meter.stalled
    engine.wait(TICK)
    assert engine.meter.stalled
    assert engine.meter.now().longest_step_s == 20


def test_a_step_is_measured_from_the_one_before_or_from_the_read_that_ended_an_idle_time(engine):
    engine.time += 50
    settle = engine.meter.take(5)
    engine.time += 2
    engine.meter.step()
    engine.time += 3
    engine.meter.step()
    settle()
    engine.time += 40
    engine.meter.step()  # what an engine puts away after a read that was cancelled
    engine.time += 40
    assert engine.meter.now().longest_step_s == 3
    assert engine.meter.now().since_last_step_s == 40


def test_a_process_that_was_stopped_for_a_minute_does_not_blame_its_engine(engine):
    engine.meter.take(5)
    engine.time += 60
    engine.meter.look(1.0)
    assert engine.meter.silent_s == 1.0
    engine.wait(5)
    assert not engine.meter.stalled


def test_silence_begins_with_the_work_or_the_last_step_not_with_the_look_before(engine):
    engine.time += 0.9
    engine.meter.take(5)
    engine.time += 0.1
    engine.meter.look(1.0)
    assert engine.meter.silent_s == pytest.approx(0.1)
    engine.time += 0.7
    engine.meter.step()
    engine.time += 0.2
    engine.meter.look(1.0)
    assert engine.meter.silent_s == pytest.approx(0.2)


def test_an_engine_whose_weights_are_loaded_is_not_stalled_and_the_time_is_no_step(engine):
    engine.meter.take(5)
    engine.wait(9)
    engine.meter.suspend()
    engine.wait(100)
    engine.meter.step()  # of its self-test
    engine.wait(100)
    assert not engine.meter.stalled and engine.meter.silent_s == 0
    assert engine.meter.now().since_last_step_s == 100
    engine.meter.resume()
    engine.wait(2)
    engine.meter.step()
    assert engine.meter.now().longest_step_s == 2
    engine.meter.suspend()
    engine.meter.resume()
    engine.wait(10.25)
    assert engine.meter.stalled
    engine.meter.resume()  # without having been suspended
    assert engine.meter.stalled


def test_outstanding_work_is_counted_exactly(engine):
    settles = [engine.meter.take(tokens) for tokens in (3, 40, 500)]
    assert (engine.meter.now().outstanding_reads, engine.meter.now().outstanding_tokens) == (3, 543)
    settles[1]("whatever a task's callback is given")
    assert (engine.meter.now().outstanding_reads, engine.meter.now().outstanding_tokens) == (2, 503)
    settles[0]()
    settles[2]()
    assert (engine.meter.now().outstanding_reads, engine.meter.now().outstanding_tokens) == (0, 0)
