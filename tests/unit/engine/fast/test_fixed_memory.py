"""Memory at a fixed address: it goes to others and comes back, and recorded work still reads it."""

from __future__ import annotations

import pytest
import torch

from moored.engine.fast.capture import capture
from moored.engine.fast.fixed_memory import FixedMemory, has_fixed_memory

GIB = 2**30


def test_a_processor_has_no_fixed_memory():
    assert not has_fixed_memory(torch.device("cpu"))


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
