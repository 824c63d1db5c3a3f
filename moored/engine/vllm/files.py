"""Weights for vLLM as files: how they reach its processes where it has several, or is a server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moored.config import Config
from moored.engine.device import pick_device, uses_bf16
from moored.engine.vllm.support import described

FILE_BYTES = 4 * 2**30
"""Files are about this large, so that no second whole model is in main memory."""


class FileWriter:
    """Writes weights where all processes of a vLLM on this machine can read them."""

    def __init__(self, source: Path | torch.nn.Module, config: Config) -> None:
        self._described = _read_config(source) if isinstance(source, Path) else described(source)
        self._dtype = file_dtype(config)
        self._place = config.engine.vllm.folder

    @contextmanager
    def written(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Path]:
        """A folder with the weights, which is removed after the block."""
        with tempfile.TemporaryDirectory(prefix="moored-vllm-", dir=self._place) as name:
            write_weights(weights, Path(name), self._described, self._dtype)
            yield Path(name)


def file_dtype(config: Config) -> torch.dtype:
    """The precision that vLLM computes in."""
    is_bf16 = uses_bf16(config.engine.dtype, pick_device(config.engine.device))
    return torch.bfloat16 if is_bf16 else torch.float32


def write_weights(
    weights: Iterable[tuple[str, torch.Tensor]], folder: Path, described: Any, dtype: torch.dtype
) -> None:
    """Write a model in Hugging Face format, with the configuration `described`."""
    from safetensors.torch import save_file

    def write() -> None:
        file = folder / f"model-{len(list(folder.glob('*.safetensors'))) + 1:05d}.safetensors"
        save_file(some, file, metadata={"format": "pt"})
        some.clear()

    some: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        # Copies, because a tied output layer has to be there too: vLLM would keep the old one.
        some[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        if sum(each.nbytes for each in some.values()) >= FILE_BYTES:
            write()
    write()
    described.save_pretrained(folder)


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
