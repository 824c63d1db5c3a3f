"""Supervised training of a small Llama on demonstrations.

Shape legend: B dialogues of a batch, T tokens, padded at the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.corpus import Corpus
from recipes.gradients import CAUSAL, IGNORED, gradient_fn
from recipes.sizes import Size
from recipes.tokenizer import END, MAX_POSITIONS, PAD

WARMUP_STEPS = 100
REPORT_EVERY = 200
NUM_WIDTHS = 16
"""Batch shapes; more waste less on padding."""


@dataclass(frozen=True, slots=True)
class Training:
    """How a training went."""

    num_steps: int
    batch_tokens: int
    loss: float
    """Mean over the last hundred steps, nats per reply token."""
    tokens_per_s: float
    train_s: float


def build_model(size: Size, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A fresh model; the same seed gives the same weights."""
    torch.manual_seed(seed)
    ids = tokenizer.get_vocab()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads,
        intermediate_size=size.intermediate_size,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
    )
    return model.float()


def train(
    model: LlamaForCausalLM,
    corpus: Corpus,
    size: Size,
    *,
    seed: int,
    device: str,
    max_minutes: float = math.inf,
    use_graphs: bool = False,
) -> Training:
    """Fit the replies of the corpus; a time limit shortens the schedule, it does not cut it off."""
    model.to(torch.device(device)).train()  # pyright: ignore[reportArgumentType]
    model.set_attn_implementation(CAUSAL)
    add_gradients = gradient_fn(model, use_graphs=use_graphs)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=device.startswith("cuda")
    )
    begin = time.perf_counter()
    losses: list[torch.Tensor] = []
    num_tokens = 0
    for step, (ids_BT, labels_BT) in enumerate(batches(corpus, size.batch_tokens, seed, device)):
        elapsed_s = time.perf_counter() - begin
        progress = max(step / size.num_steps, elapsed_s / (60 * max_minutes))
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = size.learning_rate * schedule(step, progress)
        losses.append(add_gradients(ids_BT, labels_BT))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        num_tokens += ids_BT.numel()
        if step % REPORT_EVERY == 0:
            rate = num_tokens / (time.perf_counter() - begin)
            print(f"step {step:5}  loss {losses[-1].item():.3f}  {rate:,.0f} tokens/s", flush=True)
    model.set_attn_implementation("sdpa")
    loss = torch.stack(losses[-100:]).mean().item()
    train_s = time.perf_counter() - begin
    return Training(len(losses), size.batch_tokens, loss, num_tokens / train_s, train_s)


def schedule(step: int, progress: float) -> float:
    """Share of the peak learning rate: linear warm-up, then a cosine down to 2 %."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return warmup * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)


def batches(
    corpus: Corpus, batch_tokens: int, seed: int, device: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (ids, labels) in few shapes, each of about `batch_tokens`, padding included."""
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(corpus.ids.astype(np.int32)).to(device)
    is_target = torch.from_numpy(corpus.is_target).to(device)
    lengths = torch.from_numpy(corpus.lengths).to(device)
    starts = lengths.cumsum(0) - lengths
    widths = batch_widths(corpus.lengths)
    while True:
        epoch = split_epoch(corpus.lengths, widths, batch_tokens, rng)
        # One transfer per epoch: a copy to the device in every step would wait for the last step.
        order = torch.from_numpy(np.concatenate([rows for _, rows in epoch])).to(device)
        parts = order.split([len(rows) for _, rows in epoch])
        for (width, _), rows in zip(epoch, parts, strict=True):
            columns = torch.arange(width, device=device)
            where_BT = (starts[rows, None] + columns).clamp(max=len(ids) - 1)
            inside_BT = columns < lengths[rows, None]
            ids_BT = torch.where(inside_BT, ids[where_BT].long(), 0)
            yield ids_BT, torch.where(inside_BT & is_target[where_BT], ids_BT, IGNORED)


def batch_widths(lengths: np.ndarray) -> np.ndarray:
    """Lengths to pad to, each for about as many dialogues as the others."""
    shares = np.arange(1, NUM_WIDTHS + 1) / NUM_WIDTHS
    return np.unique(np.quantile(lengths, shares, method="higher"))


def split_epoch(
    lengths: np.ndarray, widths: np.ndarray, batch_tokens: int, rng: np.random.Generator
) -> list[tuple[int, np.ndarray]]:
    """(width, rows) of every batch: each dialogue once, a few twice to fill the last batches."""
    found: list[tuple[int, np.ndarray]] = []
    place = np.searchsorted(widths, lengths)
    for index, width in enumerate(widths.tolist()):
        rows = rng.permutation(np.flatnonzero(place == index))
        num_rows = max(1, batch_tokens // width)
        shape = (math.ceil(len(rows) / num_rows), num_rows)
        found += [(width, batch) for batch in np.resize(rows, shape)]
    return [found[index] for index in rng.permutation(len(found))]
