import signal
import threading

import pytest

from jaxllm.frontend.interrupts import InterruptsBetweenSteps


@pytest.fixture(autouse=True)
def python_handler():
    """Python's own handler, also where the tests were started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


def test_interrupt_waits_for_the_check():
    reached = []
    with pytest.raises(KeyboardInterrupt), InterruptsBetweenSteps() as interrupts:
        interrupts.check()
        press_ctrl_c()
        reached.append("end of the step")
        interrupts.check()
        reached.append("next step")
    assert reached == ["end of the step"]


def test_interrupt_after_the_last_check_is_not_lost():
    with pytest.raises(KeyboardInterrupt), InterruptsBetweenSteps():
        press_ctrl_c()


def test_second_interrupt_comes_at_once():
    reached = []
    with pytest.raises(KeyboardInterrupt), InterruptsBetweenSteps():
        press_ctrl_c()
        reached.append("first")
        press_ctrl_c()
        reached.append("second")
    assert reached == ["first"]


def test_handlers_are_put_back_and_those_of_others_left_alone():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with InterruptsBetweenSteps():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    received = []
    signal.signal(signal.SIGINT, lambda signum, frame: received.append(signum))
    try:
        with InterruptsBetweenSteps() as interrupts:
            press_ctrl_c()
            interrupts.check()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert received == [signal.SIGINT]


def test_other_threads_have_no_signals_to_hold_back():
    entered = []

    def enter():
        with InterruptsBetweenSteps() as interrupts:
            interrupts.check()
            entered.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [signal.default_int_handler]
