"""What a model does in each environment before any reinforcement learning.

Shape legend: B prompts of a batch, T tokens, padded at the front.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from moored.envs.base import SPLIT_SEEDS
from moored.envs.mix import make_env
from moored.reply import parse_reply
from recipes.demonstrations import ONE_TURN
from recipes.tokenizer import PAD, render

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
