"""Copies through memory that is used again: none is overwritten before it was read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moored.engine.fast.capture import Fetch, HostBuffers, run_aside

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BUSY_CYCLES = 20_000_000
"""The device is busy for some 10 ms: the host is far ahead of it."""


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    return torch.device(request.param)


def keep_busy(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)


def test_copies_use_the_memory_of_earlier_ones(device):
    buffers = HostBuffers(device, num_buffers=2)
    places = [buffers.take((10, size), torch.int32).data_ptr() for size in (5, 7, 6, 1, 7, 2)]
    assert len(set(places)) == 2 and places[0] == places[2] == places[4]
    assert buffers.take((1024,), torch.int64).nbytes == 8192  # more than 4,096: new memory
    assert buffers.take((10, 7), torch.int32).data_ptr() == places[1]


def test_what_was_sent_arrives_although_memory_is_used_again(device):
    buffers = HostBuffers(device, num_buffers=2)
    keep_busy(device)
    array, sent = np.zeros(1000, dtype=np.int32), []
    for value in range(9):
        array[:] = value
        sent.append(buffers.send(array))
    assert [found.unique().tolist() for found in sent] == [[value] for value in range(9)]
    assert {found.dtype for found in sent} == {torch.int32}


def test_an_array_is_sent_into_a_part_of_a_tensor(device):
    buffers = HostBuffers(device)
    whole = torch.zeros(5, dtype=torch.int32, device=device)
    buffers.send(np.array([7, 8], dtype=np.int32), whole[1:3])
    assert whole.tolist() == [0, 7, 8, 0, 0]


def test_a_fetch_holds_what_there_was_while_the_next_is_made(device):
    buffers = HostBuffers(device, num_buffers=2)
    tensor = torch.zeros(3, 1000, dtype=torch.int32, device=device)
    fetches = []
    for value in range(6):
        keep_busy(device)
        tensor.fill_(value)
        fetches.append(Fetch(tensor[:, ::2], buffers))
        if value:
            found = fetches[value - 1].wait()
            assert found.shape == (3, 500) and set(found.ravel().tolist()) == {value - 1}
    assert fetches[-1].wait().min() == 5
    assert fetches[-1].is_done


@pytest.mark.gpu
def test_a_fetch_is_not_done_before_the_work_in_front_of_it():
    device = torch.device("cuda")
    keep_busy(device)
    fetch = Fetch(torch.ones(10, device=device), HostBuffers(device))
    assert not fetch.is_done
    assert fetch.wait().tolist() == [1.0] * 10
    assert fetch.is_done


@pytest.mark.gpu
def test_work_aside_takes_the_memory_of_earlier_work():
    def work() -> None:
        torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda").fill_(1)

    run_aside(work)
    reserved = torch.cuda.memory_reserved()
    for _ in range(5):
        run_aside(work)
    assert torch.cuda.memory_reserved() == reserved
