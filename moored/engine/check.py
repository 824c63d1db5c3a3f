"""Does the engine compute what the model computes? Asked once, before a run begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moored.engine.base import (
    Learner,
    Request,
    Sampler,
    SamplingParams,
    new_session,
    write_replies,
)
from moored.engine.local.families import sliding_window
from moored.errors import MooredError
from moored.types import Prompt

TOLERANCE = {False: 1e-3, True: 0.2}
"""Nats a token, without and with bfloat16."""


@torch.no_grad()
def check_engine(
    model: Any,
    learner: Learner,
    sampler: Sampler,
    *,
    temperature: float,
    max_context: int,
    bf16: bool,
) -> None:
    """Compare sampler and learner with a plain forward pass of the model; raise if they differ."""
    config = model.config
    window = sliding_window(config)
    if window is not None and window < max_context:
        raise MooredError(
            f"a {config.model_type} model with layers that look back {window} tokens only cannot "
            f"be used on longer dialogues; set max_context to {window} or less"
        )
    prompt = Prompt(np.arange(1, 7, dtype=np.int64))
    params = SamplingParams(max_tokens=3, temperature=temperature)
    try:
        request = Request(session=new_session(), prompt=prompt, seed=0)
        reply = write_replies(sampler, [request], params)[0]
        scored = learner.score(prompt, [reply.token_ids])[0]
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise MooredError(
            f"models of type {config.model_type!r} do not work with the local engine: "
            f"{type(error).__name__}: {error}"
        ) from error
    ids = torch.from_numpy(np.concatenate([prompt.ids, reply.token_ids])).to(model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=bf16):
        logits = model(input_ids=ids[None]).logits[0, len(prompt.ids) - 1 : -1].float()
    logp = torch.log_softmax(logits / temperature, dim=-1)
    plain = logp.gather(-1, ids[len(prompt.ids) :, None]).squeeze(-1).cpu().numpy()
    for name, found in (("sampler", reply.logprobs), ("learner", scored)):
        error = float(np.abs(found - plain).max())
        if not error <= TOLERANCE[bf16]:
            raise MooredError(
                f"models of type {config.model_type!r} do not work with the local engine: "
                f"log-probabilities of the {name} differ from the model's by {error:.3g} nats"
            )
