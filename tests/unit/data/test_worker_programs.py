"""Whole programs with worker processes, and all the ways in which they end."""

import os
import signal

import pytest

from popsim_torch.enums import SharingStrategy
from tests.unit.data.processes import (
    TIMEOUT,
    end_programs,
    run_program,
    start_program,
    wait_for_end,
)

ALL = [strategy.name for strategy in SharingStrategy]


@pytest.fixture(autouse=True)
def no_program_left():
    yield
    end_programs()


@pytest.mark.slow
def test_script_without_a_guard_is_told_so(tmp_path):
    result = run_program(
        tmp_path,
        """
        from popsim_torch import AsynchronousDataAccessor, SharingStrategy
        AsynchronousDataAccessor([torch.ones(1)], sharing_strategy=SharingStrategy.SharedMemory)
        """,
    )
    assert result.returncode == 1
    assert "worker thread failed to start" in result.stderr.splitlines()[-1]
    assert '`if __name__ == "__main__":`' in result.stderr.splitlines()[-1]


LEAVES = """
if __name__ == "__main__":
    data = torch.utils.data.TensorDataset(torch.arange(1000))
    loader = DataLoader(Options(), data, num_workers={num_workers}, mode=DataLoaderMode.Async,
        async_options=dict(sharing_strategy=SharingStrategy.{strategy}))
    for i, x in enumerate(loader):
        if i == 3: break
    report(loader._accessor)
    {end}
"""


def check_leaves(folder, **words):
    process, pids = start_program(folder, LEAVES.format(**words))
    output, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, output, errors) == (0, "", "")
    wait_for_end(*pids)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_program_may_leave_without_terminating(tmp_path, strategy, num_workers):
    check_leaves(tmp_path, strategy=strategy, num_workers=num_workers, end="pass")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["loader.terminate()", "sys.exit(0)"])
def test_a_program_may_leave_in_any_way(tmp_path, end):
    check_leaves(tmp_path, strategy="ForkServer", num_workers=2, end=end)


def check_killed_parent(folder, strategy, num_workers):
    """Kill a program whose worker is busy in the dataset."""
    end = "time.sleep(1000)"
    process, pids = start_program(
        folder, LEAVES.format(strategy=strategy, num_workers=num_workers, end=end)
    )
    assert len(pids) == 1 + num_workers
    process.kill()
    process.communicate(timeout=TIMEOUT)
    wait_for_end(*pids)


def test_a_worker_notices_that_its_parent_was_killed(tmp_path):
    check_killed_parent(tmp_path, "Fork", 0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ALL)
def test_workers_notice_that_their_parent_was_killed(tmp_path, strategy):
    check_killed_parent(tmp_path, strategy, 2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["Fork", "ForkServer"])
def test_a_busy_worker_notices_that_its_parent_was_killed(tmp_path, strategy):
    process, pids = start_program(
        tmp_path,
        f"""
        if __name__ == "__main__":
            accessor = AsynchronousDataAccessor(
                Slow(1000), sharing_strategy=SharingStrategy.{strategy})
            iter(accessor)
            report(accessor)
            time.sleep(1000)
        """,
    )
    process.kill()
    process.communicate(timeout=TIMEOUT)
    wait_for_end(*pids)


INTERRUPTED = """
if __name__ == "__main__":
    accessor = {accessor}
    list(itertools.islice(accessor, {num_elements}))
    try:
        report(accessor)
        {wait}
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    except AssertionError as error:
        print("died" in str(error), flush=True)
"""


def check_interrupt(folder, target, accessor, during):
    body = INTERRUPTED.format(
        accessor=accessor,
        num_elements=1 if during else 5,
        wait="list(accessor)" if during else "time.sleep(5)",
    )
    process, pids = start_program(folder, body)
    if target == "all":
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(process.pid if target == "parent" else pids[0], signal.SIGINT)
    output, errors = process.communicate(timeout=TIMEOUT)
    assert errors == ""
    assert process.returncode == 0
    if target != "worker":
        assert output == "interrupted\n"
    elif during:
        assert output == "True\n"
    wait_for_end(*pids)


SLOW_DATA = "AsynchronousDataAccessor(Slow({}), sharing_strategy=SharingStrategy.{})"


def test_an_interrupt_of_everything_is_silent(tmp_path):
    check_interrupt(tmp_path, "all", SLOW_DATA.format(1000, "Fork"), during=True)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["SharedMemory", "Fork", "ForkServer"])
@pytest.mark.parametrize("target", ["parent", "worker", "all"])
@pytest.mark.parametrize("during", [True, False])
def test_interrupts_are_silent_by_every_strategy(tmp_path, strategy, target, during):
    seconds = 2 if during else 0
    check_interrupt(tmp_path, target, SLOW_DATA.format(seconds, strategy), during)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["parent", "worker", "all"])
@pytest.mark.parametrize("strategy", ["Fork", "ForkServer"])
def test_interrupts_of_loaders_with_workers_are_silent(tmp_path, target, strategy):
    loader = (
        "DataLoader(Options(), torch.utils.data.TensorDataset(torch.arange(10**6)), num_workers=2, "
        "mode=DataLoaderMode.Async, "
        f"async_options=dict(sharing_strategy=SharingStrategy.{strategy}))._accessor"
    )
    check_interrupt(tmp_path, target, loader, during=True)


@pytest.mark.slow
def test_an_interrupt_while_waiting_leaves_the_accessor_usable(tmp_path):
    result = run_program(
        tmp_path,
        """
        if __name__ == "__main__":
            accessor = AsynchronousDataAccessor(Slow(2), sharing_strategy=SharingStrategy.Fork)
            next(accessor)
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            try:
                next(accessor)
            except KeyboardInterrupt:
                print("interrupted")
            print([int(x) for x in accessor])
            print([int(x) for x in itertools.islice(accessor, 2)])
        """,
    )
    assert result.stderr == ""
    assert result.stdout == "interrupted\n[0, 1, 2, 3, 4]\n[0, 1]\n"
