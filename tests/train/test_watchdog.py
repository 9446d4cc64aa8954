"""What a rank says of itself when the world stands still. (Worlds that hang: tests/distributed/test_run_faults.py.)"""

import threading

from perilune.train import watchdog
from perilune.train.background_save import THREAD, Saves
from perilune.train.watchdog import Watchdog


def test_a_loop_that_waits_for_a_save_is_where_its_save_is(monkeypatch):
    written, asked = threading.Event(), {}

    def write_to_a_slow_disk():
        written.wait(120)

    # The loop, as seen from the watchdog's thread: in `wait` of background_save.py, for a thread that writes.
    saves = Saves()
    saves._thread = threading.Thread(target=write_to_a_slow_disk, name=THREAD, daemon=True)
    saves._thread.start()
    loop = threading.Thread(target=saves.wait, daemon=True)
    loop.start()
    monkeypatch.setattr(watchdog.threading, "get_ident", lambda: loop.ident)
    watched = Watchdog(lambda phase: asked.update({phase: True}), timeout_s=1.0)
    watched("step:logged")
    monkeypatch.undo()
    for _ in range(1000):
        standing = watched._standing(heard=1)
        if "write_to_a_slow_disk" in str(watched._stack()):
            break
        loop.join(0.01)
    assert "write_to_a_slow_disk" in str(watched._stack())
    assert standing.phase == "step:logged" and not standing.waits and not standing.moved
    assert asked == {"step:logged": True}
    written.set()
    loop.join()
