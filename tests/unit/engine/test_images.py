"""Pictures stay with their prompts from the message to the packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from PIL import Image

from moored.config import AlgorithmConfig
from moored.engine.base import Learner, Request, SamplingParams
from moored.engine.fast.sampler import SlotSampler
from moored.engine.local.learner import LocalLearner
from moored.engine.local.sampler import LocalSampler
from moored.engine.packing import micro_batches, pack, to_line, to_tensors
from moored.engine.passes import hidden_states, trunk_of
from moored.errors import MooredError
from moored.rollout.render import Renderer
from moored.training.samples import Sample, build_samples
from moored.training.update import with_old_logprobs
from moored.types import (
    Content,
    Group,
    Message,
    Prompt,
    ScoreRequest,
    StopReason,
    Trajectory,
    Turn,
)
from tests.tiny_model import tiny_model

CPU = torch.device("cpu")
REPLIES = ("<answer>Up</answer>", "<answer>Left</answer>")


def picture(shade: int) -> Image.Image:
    return Image.new("L", (4, 4), shade)


def see(shade: int) -> Content:
    return [{"type": "text", "text": "Look: "}, {"type": "image", "image": picture(shade)}]


def play(renderer: Renderer, shades: tuple[int, int], task: int) -> Trajectory:
    """Two turns; the same text whatever the shades of the two pictures."""
    history = [Message("user", see(shades[0]))]
    prompt, turns = renderer.start(history), []
    for text, seen in zip(REPLIES, (see(shades[1]), None), strict=True):
        ids = np.array(renderer.tokenizer.encode(text))
        turns.append(
            Turn(prompt=prompt, completion_ids=ids, logprobs=np.full(len(ids), -1.0), reply=text)
        )
        if seen is not None:
            prompt = renderer.extend(prompt, ids, text, seen, history)
    return Trajectory(
        env="toy", task_seed=task, episode_seed=0, turns=tuple(turns), stop=StopReason.DONE
    )


@pytest.fixture(scope="module")
def samples(toy_tokenizer) -> list[Sample]:
    """Two groups of two trajectories: first pictures 1 and 2, later ones 11, 12 and 21, 22."""
    renderer = Renderer(
        toy_tokenizer.make_tokenizer("chatml"), image_text=lambda image: "<a picture>"
    )
    groups = [
        Group(
            group_id=task,
            env="toy",
            task_seed=task,
            trajectories=tuple(play(renderer, (task, 10 * task + k), task) for k in (1, 2)),
        )
        for task in (1, 2)
    ]
    return build_samples(groups)


def shades_of(images: tuple[object, ...]) -> list[int]:
    return [image.getpixel((0, 0)) for image in images]  # pyright: ignore[reportAttributeAccessIssue]


def test_a_sample_holds_the_pictures_of_its_prompt_apart_from_later_ones(samples):
    assert [shades_of(sample.prompt.images) for sample in samples] == [[1], [1], [2], [2]]
    assert [shades_of(sample.images) for sample in samples] == [[11], [12], [21], [22]]
    first = samples[0]
    for sample in samples[1:]:
        np.testing.assert_array_equal(sample.prompt.ids, first.prompt.ids)
        np.testing.assert_array_equal(sample.ids_T, first.ids_T)
    # Only the replies are trained on, neither pictures nor the words around them.
    assert first.num_loss_tokens < len(first.ids_T)


def test_equal_text_with_other_pictures_is_another_prompt(samples):
    assert samples[0].prompt == samples[1].prompt != samples[2].prompt == samples[3].prompt
    assert len({sample.prompt.key for sample in samples}) == 2


def test_groups_with_other_pictures_never_share_a_row(samples):
    lengths = [len(sample.ids_T) for sample in samples]
    rows = pack([sample.prompt for sample in samples], lengths, max_tokens=10_000)
    assert sorted(row.items for row in rows) == [(0, 1), (2, 3)]
    assert sorted(shades_of(row.prompt.images) for row in rows) == [[1], [2]]


@pytest.mark.parametrize(
    ("lay_out", "expected"),
    [
        # Row by row: the prompt of a row, then its continuations.
        (to_tensors, [1, 11, 12, 2, 21, 22]),
        # All prompts, then all continuations.
        (to_line, [1, 2, 11, 12, 21, 22]),
    ],
)
def test_a_batch_holds_all_pictures_in_the_order_of_their_places(samples, lay_out, expected):
    ids = [sample.ids_T for sample in samples]
    rows = pack([sample.prompt for sample in samples], list(map(len, ids)), max_tokens=10_000)
    (batch,) = micro_batches(rows, max_tokens=10_000)
    packed = lay_out(batch, ids, CPU, [sample.images for sample in samples])
    assert shades_of(packed.images) == expected


def test_a_model_of_text_refuses_a_batch_with_pictures(samples):
    sample = samples[0]
    rows = pack([sample.prompt], [len(sample.ids_T)], max_tokens=10_000)
    packed = to_line(rows, [sample.ids_T], CPU, [sample.images])
    with pytest.raises(MooredError, match="2 images, but this model reads text only; choose a"):
        hidden_states(trunk_of(tiny_model(vocab_size=640)), packed)


def test_old_log_probs_are_scored_with_the_pictures_of_later_turns(samples):
    asked: list[ScoreRequest] = []

    class Scorer:
        def score(self, requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
            asked.extend(requests)
            return [[np.zeros(len(ids)) for ids in r.continuations] for r in requests]

    with_old_logprobs(AlgorithmConfig(old_logprobs="learner"), cast(Learner, Scorer()), samples)
    assert [shades_of(request.prompt.images) for request in asked] == [[1], [1], [2], [2]]
    later = [[shades_of(images) for images in request.images or ()] for request in asked]
    assert later == [[[11]], [[12]], [[21]], [[22]]]


def test_a_learner_of_text_does_not_score_a_continuation_with_a_picture(samples):
    """The tokens that stand for the picture would be scored as words."""
    learner, sample = LocalLearner(tiny_model(vocab_size=640)), samples[0]
    text = ScoreRequest(Prompt(sample.prompt.ids), [sample.ids_T, sample.ids_T[:3]])
    assert [len(logp) for logp in learner.score([text])[0]] == [len(sample.ids_T), 3]
    with pytest.raises(MooredError, match="1 images, but this model reads text only"):
        learner.score([replace(text, images=[(), sample.images])])


@pytest.mark.parametrize(
    "make",
    [
        LocalSampler,
        lambda model: SlotSampler(model, dtype=torch.float32, max_context=64),
        lambda model: SlotSampler(model, dtype=torch.float32, max_context=64, streams=True),
    ],
    ids=["plain", "fast in lockstep", "fast as a stream"],
)
def test_a_sampler_of_text_refuses_a_prompt_with_pictures(make):
    stream = make(tiny_model(vocab_size=8).eval()).stream(SamplingParams(max_tokens=4))
    prompt = Prompt(np.array([1, 2, 3]), (picture(1),))
    with pytest.raises(MooredError, match="holds an image, but this sampler reads text only"):
        stream.submit(Request(session=0, prompt=prompt, seed=0))
        stream.poll()
