"""Chunked log-probabilities and entropies against softmax over all logits at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moored.engine import passes
from moored.engine.packing import pack, to_tensors
from moored.errors import MooredError
from moored.types import Prompt
from tests.tiny_model import tiny_model


@pytest.mark.parametrize("tokens", [1, 7, 20])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("cap", [None, 2.0], ids=["plain", "capped"])
def test_values_and_gradients_equal_a_plain_softmax(monkeypatch, tokens, temperature, cap):
    monkeypatch.setitem(passes.LOGITS_PER_CHUNK, "cpu", 1)
    monkeypatch.setattr(passes, "MIN_CHUNK", 6)
    model = tiny_model().double()
    model.config.final_logit_softcapping = cap
    hidden = torch.randn(tokens, 32, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(64, (tokens,))
    weight = model.lm_head.weight
    to_logp, to_entropy = torch.randn(2, tokens)

    logits = hidden @ weight.t()
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    expected = log_p[torch.arange(tokens), targets], -(log_p.exp() * log_p).sum(dim=-1)
    found = passes.token_logprobs(
        model, hidden, targets, temperature=temperature, with_entropy=True
    )
    slopes = []
    for logp, entropy in (expected, found):
        total = (logp * to_logp).sum() + (entropy * to_entropy).sum()
        slopes.append(torch.autograd.grad(total, (hidden, weight)))
    for ours, plain in zip((*found, *slopes[1]), (*expected, *slopes[0]), strict=True):
        # Results are float32 whatever the model is.
        torch.testing.assert_close(ours.double(), plain.double(), atol=2e-6, rtol=2e-6)


def test_two_equally_likely_tokens_have_entropy_log_2_worked_out_by_hand():
    model = tiny_model().double()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[2:, 0] = -1000.0
    hidden = torch.zeros(1, 32, dtype=torch.float64)
    hidden[0, 0] = 1.0
    logp, entropy = passes.token_logprobs(
        model, hidden, torch.tensor([1]), temperature=1.0, with_entropy=True
    )
    np.testing.assert_allclose(
        [logp.detach().item(), entropy.detach().item()], [-np.log(2), np.log(2)], rtol=1e-6
    )


def test_a_critic_fits_a_trunk_whose_last_weight_is_not_a_norm():
    """OLMo's norms have no weights: the last one is of the gated units, 48 wide and not 32."""
    model = tiny_model("olmo", pad_token_id=0, eos_token_id=1)
    prompt, reply = Prompt(np.array([3, 4, 5])), np.array([6, 7])
    packed = to_tensors(pack([prompt], [2], max_tokens=8), [reply], torch.device("cpu"))
    values = passes.Critic(model)(packed)
    assert values.tolist() == [0.0, 0.0]  # its head begins at 0


def test_a_model_that_hides_its_layers_is_refused_in_a_sentence():
    sizes = {"num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8}
    model = tiny_model("llama4_text", interleave_moe_layer_step=1, **sizes)
    with pytest.raises(MooredError, match=r"of type 'llama4_text' do not work .* does not find"):
        passes.trunk_of(model)
