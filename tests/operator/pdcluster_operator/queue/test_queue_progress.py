from pdcluster_api.apiserver.kinds import Key
from pdcluster_operator.queue.resync import (
    MAX_MISSES,
    MAX_WAIT_SECONDS,
    MAX_WORK_SECONDS,
    QueueHealth,
)
from pdcluster_operator.queue.work_queue import WorkQueue

KEY = Key("default", "chat")


def test_a_process_that_makes_progress_has_no_problem():
    progress, queue = QueueHealth(resync_seconds=300.0, resynced=0.0), WorkQueue[Key]()
    queue.add(KEY, 899.0)
    assert progress.problems(queue, 900.0) == []


def test_a_key_that_no_worker_takes_is_a_problem():
    progress, queue = QueueHealth(300.0, 0.0), WorkQueue[Key]()
    queue.add(KEY, 0.0)
    assert progress.problems(queue, MAX_WAIT_SECONDS) == []
    assert (
        "no reconcile has begun or ended for 121 s"
        in progress.problems(queue, MAX_WAIT_SECONDS + 1)[0]
    )


def test_a_long_queue_that_moves_is_no_problem_however_long_its_end_waits():
    progress, queue = QueueHealth(300.0, 0.0), WorkQueue[int]()
    for number in range(1000):
        queue.add(number, 0.0)
    now = 0.0
    while queue.depth:
        keys = [queue.take(now) for _ in range(4)]
        now += 0.8
        for key in keys:
            assert key is not None
            queue.succeeded(key, now)
        assert progress.problems(queue, now) == []
    assert now > MAX_WAIT_SECONDS


def test_work_that_does_not_end_is_a_problem_that_names_the_key():
    progress, queue = QueueHealth(300.0, 0.0), WorkQueue[Key]()
    queue.add(KEY, 0.0)
    queue.take(0.0)
    assert progress.problems(queue, MAX_WORK_SECONDS) == []
    assert "default/chat" in progress.problems(queue, MAX_WORK_SECONDS + 1)[0]


def test_a_resync_that_stopped_moving_is_a_problem_until_one_ends():
    progress, queue = QueueHealth(10.0, 0.0), WorkQueue[Key]()
    late = 3 * 10.0 + MAX_WORK_SECONDS + 1
    assert "no resync" in progress.problems(queue, late)[0]
    progress.resync_ended(late, ["Pod"], [])
    assert progress.problems(queue, late) == []


def test_a_watch_is_silent_after_so_many_misses_in_a_row_and_not_before():
    progress, queue = QueueHealth(300.0, 0.0), WorkQueue[Key]()
    for _ in range(MAX_MISSES):
        assert progress.problems(queue, 1.0) == []
        progress.resync_ended(1.0, ["Pod", "Service"], ["Pod"])
    assert progress.problems(queue, 1.0) == ["the watch of Pod is silent"]
    progress.resync_ended(2.0, ["Pod", "Service"], [])
    assert progress.problems(queue, 2.0) == []
