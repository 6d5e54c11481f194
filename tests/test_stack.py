"""Whether a call is on a thread's stack, which another thread asks while it goes on."""

import gc
import inspect
import threading

from tf_recsync import _engine


def call_of_this_frame():
    frame = inspect.currentframe().f_back
    return threading.get_ident(), id(frame), frame.f_code


def test_a_call_is_on_its_threads_stack_until_it_returns():
    found, is_there, go_on = [], threading.Event(), threading.Event()

    def outer():
        found.append(call_of_this_frame())
        inner()

    def inner():
        is_there.set()
        go_on.wait()

    thread = threading.Thread(target=outer)
    thread.start()
    is_there.wait()
    (call,) = found
    assert _engine.is_on_stack(*call)
    assert not _engine.is_on_stack(*call[:2], inner.__code__)
    assert not _engine.is_on_stack(threading.get_ident(), *call[1:])
    go_on.set()
    thread.join()
    assert not _engine.is_on_stack(*call)


def test_stacks_that_change_all_the_time_can_be_looked_at():
    is_over = threading.Event()

    def deep(n):
        return deep(n - 1) if n else [object() for _ in range(5)]

    def work():
        while not is_over.is_set():
            deep(30)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    thread, frame, code = call_of_this_frame()
    try:
        for _ in range(20_000):
            assert _engine.is_on_stack(thread, frame, code)
            assert not any(_engine.is_on_stack(t.ident, frame, code) for t in threads)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert gc.isenabled()
