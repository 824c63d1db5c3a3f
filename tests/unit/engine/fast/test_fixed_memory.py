"""Memory at a fixed address: it goes to others and comes back, and recorded work still reads it."""

from __future__ import annotations

import gc

import pytest
import torch

from moored.engine.fast import fixed_memory
from moored.engine.fast.capture import capture
from moored.engine.fast.fixed_memory import FixedMemory, has_fixed_memory
from moored.errors import MooredError

GIB = 2**30


def test_a_processor_has_no_fixed_memory():
    assert not has_fixed_memory(torch.device("cpu"))


class FakeDriver:
    """CUDA's driver as far as it counts: what is reserved and mapped. `refused` is said no to."""

    def __init__(self) -> None:
        self.num_reserved = self.num_mapped = 0
        self.refused = ""

    def __getattr__(self, name):
        def call(*arguments):
            if name == self.refused or (name == "cuMemUnmap" and not self.num_mapped):
                return 1
            if name == "cuMemGetAllocationGranularity":
                arguments[0]._obj.value = 2 << 20
            self.num_reserved += {"cuMemAddressReserve": 1, "cuMemAddressFree": -1}.get(name, 0)
            self.num_mapped += {"cuMemMap": 1, "cuMemUnmap": -1}.get(name, 0)
            return 0

        return call


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(fixed_memory, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: torch.zeros(30, dtype=torch.uint8))
    return driver


def small_memory() -> FixedMemory:
    return FixedMemory((3, 5), torch.bfloat16, torch.device("cuda", 0))


@pytest.mark.parametrize("is_lent", [False, True])
def test_memory_that_nobody_closed_is_freed_with_its_owner(driver, is_lent):
    memory = small_memory()
    if is_lent:
        memory.give_back()
    assert (driver.num_reserved, driver.num_mapped) == (1, int(not is_lent))
    del memory
    gc.collect()
    assert (driver.num_reserved, driver.num_mapped) == (0, 0)


def test_memory_that_was_closed_is_not_freed_twice(driver):
    memory = small_memory()
    memory.close()
    other = small_memory()
    del memory
    gc.collect()
    assert (driver.num_reserved, driver.num_mapped) == (1, 1)
    other.close()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_memory_that_cannot_be_used_is_not_there(driver, call):
    memory = small_memory()
    memory.give_back()
    driver.refused = call
    with pytest.raises(MooredError, match=call):
        memory.take()
    assert not memory.is_there and not driver.num_mapped
    with pytest.raises(MooredError, match=call):
        small_memory()
    gc.collect()
    assert driver.num_reserved == 1
    memory.close()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.mark.gpu
def test_it_is_zero_whenever_it_is_taken(device):
    memory = FixedMemory((3, 5), torch.bfloat16, device)
    assert memory.tensor.shape == (3, 5) and memory.tensor.dtype == torch.bfloat16
    address = memory.tensor.data_ptr()
    assert not memory.tensor.any()
    memory.tensor.fill_(7)
    memory.give_back()
    memory.take()
    assert memory.tensor.data_ptr() == address and not memory.tensor.any()
    memory.close()


@pytest.mark.gpu
def test_others_have_it_in_between(device):
    free = torch.cuda.mem_get_info(device)[0]
    memory = FixedMemory((GIB,), torch.uint8, device)
    assert memory.num_bytes == GIB
    assert torch.cuda.mem_get_info(device)[0] <= free - GIB
    memory.give_back()
    assert memory.num_bytes == 0
    assert torch.cuda.mem_get_info(device)[0] > free - GIB // 2
    memory.give_back()
    memory.close()


@pytest.mark.gpu
def test_recorded_work_reads_it_after_it_was_lent(device):
    memory = FixedMemory((1000,), torch.float32, device)
    found = torch.zeros(1000, device=device)
    found.copy_(memory.tensor + 1)  # what torch compiles and loads for it is there before
    graph, _ = capture(lambda: found.copy_(memory.tensor + 1), None)
    memory.give_back()
    other = torch.full((GIB,), 3, dtype=torch.uint8, device=device)
    memory.take()
    memory.tensor.copy_(torch.arange(1000))
    graph.replay()
    assert torch.equal(found.cpu(), torch.arange(1000) + 1.0)
    assert int(other.max()) == 3
    memory.close()


@pytest.mark.gpu
def test_too_much_is_out_of_memory_and_leaves_nothing_behind(device):
    free, total = torch.cuda.mem_get_info(device)
    with pytest.raises(torch.OutOfMemoryError, match="no room on the GPU"):
        FixedMemory((2 * total,), torch.uint8, device)
    assert torch.cuda.mem_get_info(device)[0] > free - GIB // 2


@pytest.mark.gpu
def test_what_torch_only_keeps_makes_room_for_it(device):
    free = torch.cuda.mem_get_info(device)[0]
    kept = torch.empty(int(0.8 * free), dtype=torch.uint8, device=device)
    del kept
    assert torch.cuda.mem_get_info(device)[0] < free // 2
    memory = FixedMemory((free // 2,), torch.uint8, device)
    memory.close()
