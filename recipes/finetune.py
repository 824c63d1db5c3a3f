"""Supervised training of a small Llama on demonstrations, and what the result can do.

Shape legend: B dialogues of a batch, T tokens, padded.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from moored.envs.base import SPLIT_SEEDS, parse_reply
from moored.envs.mix import make_env
from recipes.corpus import Corpus
from recipes.demonstrations import ONE_TURN
from recipes.sizes import Size
from recipes.tokenizer import END, MAX_POSITIONS, PAD, render

IGNORED = -100
WARMUP_STEPS = 100
REPORT_EVERY = 200
BATCHES_SORTED_TOGETHER = 32
MAX_REPLY_TOKENS = 128

START_TASKS: tuple[tuple[str, Mapping[str, object]], ...] = (
    ("sokoban", ONE_TURN),
    ("frozen_lake", ONE_TURN),
    ("countdown", {}),
    ("bandit", {}),
    ("metamath", {"level": 1, "max_turns": 1}),
)
"""What a finished model is tried on: the one-turn form of each environment."""


@dataclass(frozen=True, slots=True)
class Training:
    """How a training went."""

    num_steps: int
    batch_tokens: int
    loss: float
    """Mean over the last hundred steps, nats per reply token."""
    tokens_per_s: float
    train_s: float


@dataclass(frozen=True, slots=True)
class StartRates:
    """What a model does in one environment before any reinforcement learning."""

    env: str
    options: Mapping[str, object]
    num_tasks: int
    success: float
    validity: float
    """Share of replies the environment could read."""
    grounded: float
    """Share of replies whose reasoning holds a number or a name of the observation."""
    prompt_tokens: float
    reply_tokens: float


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
) -> Training:
    """Fit the replies of the corpus; a time limit shortens the schedule, it does not cut it off."""
    model.to(torch.device(device)).train()  # pyright: ignore[reportArgumentType]
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
        losses.append(_update(model, optimizer, ids_BT, labels_BT))
        num_tokens += ids_BT.numel()
        if step % REPORT_EVERY == 0:
            rate = num_tokens / (time.perf_counter() - begin)
            print(f"step {step:5}  loss {losses[-1].item():.3f}  {rate:,.0f} tokens/s", flush=True)
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
    """Endless (ids, labels) of about equally long dialogues, `batch_tokens` with padding."""
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(corpus.ids.astype(np.int32)).to(device)
    is_target = torch.from_numpy(corpus.is_target).to(device)
    lengths = torch.from_numpy(corpus.lengths).to(device)
    starts = lengths.cumsum(0) - lengths
    while True:
        epoch = split_epoch(corpus.lengths, batch_tokens, rng)
        # One transfer an epoch: a copy to the device in every step would wait for the step before.
        order = torch.from_numpy(np.concatenate(epoch)).to(device)
        widths = [int(corpus.lengths[rows].max()) for rows in epoch]
        for rows, width in zip(order.split([len(rows) for rows in epoch]), widths, strict=True):
            columns = torch.arange(width, device=device)
            where_BT = (starts[rows, None] + columns).clamp(max=len(ids) - 1)
            inside_BT = columns < lengths[rows, None]
            ids_BT = torch.where(inside_BT, ids[where_BT].long(), 0)
            yield ids_BT, torch.where(inside_BT & is_target[where_BT], ids_BT, IGNORED)


def split_epoch(
    lengths: np.ndarray, batch_tokens: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Every dialogue once: shuffled, sorted by length within stretches, cut into batches."""
    order = rng.permutation(len(lengths))
    per_stretch = BATCHES_SORTED_TOGETHER * max(1, int(batch_tokens / lengths.mean()))
    found: list[np.ndarray] = []
    for first in range(0, len(order), per_stretch):
        stretch = order[first : first + per_stretch]
        stretch = stretch[np.argsort(lengths[stretch], kind="stable")]
        while len(stretch):
            # Rows ascend in length, so the last row of a batch is what the others are padded to.
            padded = lengths[stretch] * np.arange(1, len(stretch) + 1)
            count = max(1, int(np.searchsorted(padded, batch_tokens, side="right")))
            found.append(stretch[:count])
            stretch = stretch[count:]
    return [found[place] for place in rng.permutation(len(found))]


def _update(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    ids_BT: torch.Tensor,
    labels_BT: torch.Tensor,
) -> torch.Tensor:
    """One optimizer step; padding stands at the end, where causal attention does not see it."""
    with _autocast(ids_BT.device):
        logits = model(input_ids=ids_BT, use_cache=False).logits
    loss = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels_BT[:, 1:].flatten(), ignore_index=IGNORED
    )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    if device.type == "cpu":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def measure_start(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, num_tasks: int, seed: int
) -> list[StartRates]:
    """Try the model on validation tasks, one sample each at temperature 1."""
    torch.manual_seed(seed)
    model.eval()
    return [
        _try_task(model, tokenizer, env, options, num_tasks=num_tasks)
        for env, options in START_TASKS
    ]


def _try_task(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    env_name: str,
    options: Mapping[str, object],
    *,
    num_tasks: int,
) -> StartRates:
    first_seed = SPLIT_SEEDS["validation"].start
    envs = [make_env(env_name, **options) for _ in range(num_tasks)]
    chats = [env.reset(first_seed + i, episode_seed=i) for i, env in enumerate(envs)]
    prompts = [render(tokenizer, chat) for chat in chats]
    sampled = sample(model, tokenizer, prompts)
    replies = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    results = [env.step(reply) for env, reply in zip(envs, replies, strict=True)]
    facts = [states_fact(reply, chat[-1].text) for reply, chat in zip(replies, chats, strict=True)]
    return StartRates(
        env=env_name,
        options=options,
        num_tasks=num_tasks,
        success=float(np.mean([result.success for result in results])),
        validity=float(np.mean([result.is_valid for result in results])),
        grounded=float(np.mean(facts)),
        prompt_tokens=float(np.mean([len(prompt) for prompt in prompts])),
        reply_tokens=float(sampled.ne(tokenizer.get_vocab()[PAD]).sum(1).float().mean()),
    )


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[list[int]]
) -> torch.Tensor:
    """One reply to each prompt, padded at the end."""
    width = max(map(len, prompts))
    pad = tokenizer.get_vocab()[PAD]
    ids_BT = torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts])
    mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    output = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        input_ids=ids_BT.to(model.device),
        attention_mask=mask_BT.to(model.device),
        max_new_tokens=MAX_REPLY_TOKENS,
    )
    return output[:, width:]


def states_fact(reply: str, observation: str) -> bool:
    """True when the reasoning holds a number, or a long name that the observation holds too."""
    words = re.findall(r"\w+", parse_reply(reply).think or "")
    observed = set(re.findall(r"[A-Z]\w{3,}", observation))
    return any(word.isdigit() or word in observed for word in words)
