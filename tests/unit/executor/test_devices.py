"""The registry of simulated devices."""

import gc
import threading

import pytest

from popsim_torch.errors import Error
from popsim_torch.executor.devices import DeviceRegistry

SECONDS = 30


def test_the_lowest_free_device_is_taken():
    devices = DeviceRegistry()
    first, second, third = (devices.acquire(1) for _ in range(3))
    assert (first.id, second.id, third.id) == (0, 1, 2)
    second.release()
    assert devices.acquire(1).id == 1


@pytest.mark.parametrize(
    ("num_ipus", "device_id", "ipus"),
    [(1, 0, 1), (2, 64, 2), (3, 96, 4), (4, 96, 4), (64, 126, 64)],
)
def test_groups_have_ids_behind_those_of_single_ipus(num_ipus, device_id, ipus):
    devices = DeviceRegistry()
    device = devices.acquire(num_ipus)
    assert (device.id, device.num_ipus) == (device_id, ipus)
    assert devices.lowest_match(num_ipus) == device_id


def test_a_group_needs_all_of_its_ipus():
    devices = DeviceRegistry(4)
    single = devices.acquire(1, 2)
    pair = devices.acquire(2)
    assert pair.id == 4
    with pytest.raises(Error, match=r"Failed to acquire 2 IPU\(s\): in use"):
        devices.acquire(2)
    single.release()
    assert devices.acquire(2).id == 5


def test_a_group_with_more_ipus_than_needed_is_taken_where_no_other_is_free():
    devices = DeviceRegistry(4)
    held = [devices.acquire(1, 0), devices.acquire(1, 1)]
    assert devices.acquire(1).id == 2
    assert len(held) == 2


def test_a_device_asked_for_is_exclusive():
    devices = DeviceRegistry()
    device = devices.acquire(1, 7)
    assert device.id == 7
    with pytest.raises(Error, match="Failed to acquire device 7: in use"):
        devices.acquire(1, 7)
    device.release()
    device.release()
    assert devices.acquire(1, 7).id == 7


def test_releasing_twice_frees_nothing_of_somebody_else():
    devices = DeviceRegistry()
    first = devices.acquire(1, 0)
    first.release()
    second = devices.acquire(1, 0)
    first.release()
    with pytest.raises(Error, match="Failed to acquire"):
        devices.acquire(1, 0)
    assert second.id == 0


def test_a_device_that_nobody_holds_is_free():
    devices = DeviceRegistry()
    device = devices.acquire(1, 5)
    del device
    assert devices.acquire(1, 5).id == 5


def test_a_device_held_by_garbage_is_free():
    devices = DeviceRegistry(1)
    gc.disable()
    try:
        cycle = [devices.acquire(1)]
        cycle.append(cycle)
        del cycle
        assert devices.acquire(1).id == 0
    finally:
        gc.enable()


def test_a_device_with_too_few_ipus_is_refused():
    with pytest.raises(Error, match=r"device 3: it has 1 IPU\(s\), and the model needs 2.* 64 on"):
        DeviceRegistry().acquire(2, 3)


def test_more_ipus_than_there_are_is_refused():
    with pytest.raises(Error, match="the machine has 64"):
        DeviceRegistry().acquire(65)


def test_a_negative_id_is_refused():
    with pytest.raises(Error, match="ids begin at 0"):
        DeviceRegistry().acquire(1, -1)


def test_any_other_id_is_a_machine_of_its_own():
    devices = DeviceRegistry()
    far, farther = devices.acquire(64, 1000), devices.acquire(1, 1001)
    assert (far.num_ipus, farther.num_ipus) == (64, 64)
    assert devices.acquire(64).id == 126
    with pytest.raises(Error, match="Failed to acquire device 1000"):
        devices.acquire(1, 1000)


def test_waiting_ends_when_a_device_is_released(monkeypatch):
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    devices = DeviceRegistry(1, retry_seconds=SECONDS)
    held = devices.acquire(1)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(devices.acquire(1)))
    thread.start()
    thread.join(0.05)
    assert taken == []
    held.release()
    thread.join(SECONDS)
    assert [device.id for device in taken] == [0]


def test_waiting_tries_again_after_an_interval(monkeypatch):
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    devices = DeviceRegistry(1, retry_seconds=0.01)
    device = devices.acquire(1)
    # The registry gets no notice, as if another process had released the device.
    timer = threading.Timer(0.05, lambda: devices._busy.clear())
    timer.start()
    assert devices.acquire(1).id == 0
    timer.join(SECONDS)
    assert device.id == 0


def test_waiting_can_be_interrupted(monkeypatch):
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    devices = DeviceRegistry(1)
    device = devices.acquire(1)

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(devices._changed, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        devices.acquire(1)
    device.release()
    assert devices.acquire(1).id == 0


def test_threads_never_share_a_device():
    devices = DeviceRegistry(4)
    taken, lock = [], threading.Lock()

    def use():
        for _ in range(50):
            try:
                device = devices.acquire(1)
            except Error:
                continue
            with lock:
                assert device.id not in taken
                taken.append(device.id)
            with lock:
                taken.remove(device.id)
            device.release()

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert taken == []
