"""The order in which a server's store thread does its work."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.runtime.task.store_queue import StoreQueue


def _noting(done: list[str], name: str) -> Callable[[], None]:
    return lambda: done.append(name)


def _drain(queue: StoreQueue) -> None:
    while (work := queue.get()) is not None:
        work()


def test_of_updates_that_wait_the_bucket_of_the_first_layer_goes_first() -> None:
    queue, done = StoreQueue(), list[str]()
    for bucket in (0, 3, 1, 2):
        queue.put_update(bucket, _noting(done, f"update {bucket}"))
    queue.put(None)
    _drain(queue)
    assert done == ["update 3", "update 2", "update 1", "update 0"]


def test_an_update_never_overtakes_other_work() -> None:
    """A checkpoint's copy must see the version it was asked for: neither an older nor a newer one."""
    queue, done = StoreQueue(), list[str]()
    queue.put_update(0, _noting(done, "update 0"))
    queue.put(_noting(done, "copy for a checkpoint"))
    queue.put_update(9, _noting(done, "update 9"))
    queue.put_update(10, _noting(done, "update 10"))
    assert queue.qsize() == 4
    queue.put(None)
    _drain(queue)
    assert done == ["update 0", "copy for a checkpoint", "update 10", "update 9"]
    assert queue.qsize() == 0


def test_two_updates_of_one_bucket_keep_their_order() -> None:
    queue, done = StoreQueue(), list[str]()
    queue.put_update(1, _noting(done, "first"))
    queue.put_update(1, _noting(done, "second"))
    queue.put(None)
    _drain(queue)
    assert done == ["first", "second"]
