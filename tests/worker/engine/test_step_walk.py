"""Files of the engine that one step enters: a reader has to open these."""

import sys
from pathlib import Path

import pdcluster_worker.engine
from pdcluster_worker.messages import engine as m

ENGINE = str(Path(pdcluster_worker.engine.__file__).parent)
MOST_FILES = 10


def watch_steps(core):
    """A list that grows with each step, by the files of the engine which that enters."""
    entered, step = [], core.step

    def watched():
        files = set()

        def enter(frame, event, argument):
            if frame.f_code.co_filename.startswith(ENGINE):
                files.add(frame.f_code.co_filename.removeprefix(ENGINE))

        before = sys.gettrace()
        sys.settrace(enter)
        try:
            return step()
        finally:
            sys.settrace(before)
            entered.append(files)

    core.step = watched
    return entered


def test_a_step_enters_at_most_ten_files(engine, spec):
    rig = engine(num_blocks=7, prefix_caching=False, max_batched_tokens=8)
    entered = watch_steps(rig.core)
    for name in "ab":
        rig.handle(m.Submit(spec(name, list(range(9)), max_tokens=10)))
    rig.run()
    assert rig.stats.preemptions == 1
    assert max(map(len, entered)) <= MOST_FILES, entered


def test_steps_of_a_remote_prefill_enter_at_most_ten_files(pair, spec):
    both = pair(prefill={"max_batched_tokens": 4})
    prefill, decode = watch_steps(both.prefill.core), watch_steps(both.decode.core)
    both.start(spec("a", list(range(10)), max_tokens=4))
    both.finish()
    assert len(both.decode.token_ids("a")) == 3
    assert max(map(len, prefill)) <= MOST_FILES, prefill
    assert max(map(len, decode)) <= MOST_FILES, decode
