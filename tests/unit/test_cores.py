"""Limits of a container count, where there are any."""

from __future__ import annotations

import pytest

from moored.cores import main_memory_bytes


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_memory_is_what_the_container_may_use(tmp_path, name):
    whole = main_memory_bytes(tmp_path)
    assert whole > 2**28
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("104857600\n")
    assert main_memory_bytes(tmp_path) == 100 * 2**20
    for unlimited in ("max\n", f"{2**63 - 4096}\n"):
        file.write_text(unlimited)
        assert main_memory_bytes(tmp_path) == whole
