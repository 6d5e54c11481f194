"""Workers stand still while this process reads what they train, and go on."""

import threading

from helpers import BATCH, AtBatch, compiled, dataset

import tf_recsync as recsync
from tf_recsync.strategies.worker_run import WorkerRun


def test_another_thread_that_reads_while_they_go_on_does_not_hold_them(clusters, monkeypatch):
    strategy = recsync.AsyncStrategy(clusters.get(2, 1))
    recsync.testing.set_compute_time(strategy, 0.01)
    model = compiled(strategy)
    go_on, threads = WorkerRun.go_on, []

    def go_on_and_be_read(run):
        threads.append(threading.Thread(target=model.train_function._hold))
        threads[-1].start()
        threads[-1].join(0.5)  # It may wait until they have gone on.
        go_on(run)

    monkeypatch.setattr(WorkerRun, "go_on", go_on_and_be_read)
    read = AtBatch(3, lambda: model.trainable_variables[0].numpy())
    # It ends, though nobody lets them go on but who waits for their steps.
    model.fit(dataset(40 * BATCH), verbose=0, callbacks=[read])
    for thread in threads:
        thread.join()
    assert threads
    assert sum(strategy.worker_steps(model)) == 40
