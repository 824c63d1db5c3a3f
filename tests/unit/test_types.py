"""The records refuse what would make everything after them wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image

from moored.errors import MooredError
from moored.types import (
    Completion,
    Content,
    FinishReason,
    Group,
    ImagePart,
    Message,
    Prompt,
    StopReason,
    TextPart,
    Trajectory,
    Turn,
    content_images,
    messages_digest,
)


def picture(colour: str) -> Content:
    return [
        {"type": "text", "text": "look: "},
        {"type": "image", "image": Image.new("RGB", (2, 2), colour)},
    ]


def turn(prompt=(1, 2), reply=(3, 4, 5), reward=0.0, **fields) -> Turn:
    return Turn(
        prompt=Prompt(np.array(prompt), content_images(fields.get("seen", ""))),
        completion_ids=np.array(reply),
        logprobs=np.zeros(len(reply)),
        reply="",
        reward=reward,
        **fields,
    )


def trajectory(*turns: Turn, stop=StopReason.DONE, env="toy", task_seed=0) -> Trajectory:
    return Trajectory(env=env, task_seed=task_seed, episode_seed=0, turns=turns, stop=stop)


def group(*trajectories: Trajectory) -> Group:
    return Group(group_id=0, env="toy", task_seed=0, trajectories=trajectories)


def test_messages_hold_text_or_parts_as_chat_templates_take_them():
    plain = Message("user", "hello")
    assert (plain.text, plain.images) == ("hello", ())
    assert plain.to_dict() == {"role": "user", "content": "hello"}
    parts = Message("user", picture("red"))
    assert parts.text == "look: "
    assert len(parts.images) == 1
    assert parts.to_dict()["content"] is parts.content


def test_digest_tells_roles_texts_and_pixels_apart():
    variants = [
        [Message("user", "ab")],
        [Message("system", "ab")],
        [Message("user", "a"), Message("user", "b")],
        [Message("user", picture("red"))],
        [Message("user", picture("blue"))],
    ]
    assert len({messages_digest(messages) for messages in variants}) == 5
    assert messages_digest([Message("user", picture("red"))]) == messages_digest(variants[3])


def test_digest_of_a_part_that_is_no_image_is_refused():
    with pytest.raises(MooredError, match="PIL image, got str"):
        messages_digest([Message("user", [{"type": "image", "image": "cat.png"}])])


def test_prompts_are_equal_by_ids_and_pixels():
    red, blue = Image.new("RGB", (2, 2), "red"), Image.new("RGB", (2, 2), "blue")
    assert Prompt(np.array([1, 2])).key == Prompt(np.array([1, 2], dtype=np.int32)).key
    keys = {Prompt(np.array([1]), images).key for images in ((), (red,), (blue,))}
    assert len(keys) == 3


def test_spans_cut_reasoning_and_action_out_of_the_sampled_ids():
    reply = turn(reply=(10, 11, 12, 13, 14), think_span=(1, 3), answer_span=(4, 5))
    assert reply.reasoning_ids.tolist() == [11, 12]
    assert reply.action_ids.tolist() == [14]
    assert turn().reasoning_ids.tolist() == []


def test_spans_outside_the_reply_and_missing_logprobs_are_refused():
    with pytest.raises(MooredError, match=r"think_span \(1, 9\)"):
        turn(think_span=(1, 9))
    with pytest.raises(MooredError, match="one logprob per sampled token"):
        Turn(
            prompt=Prompt(np.array([1])),
            completion_ids=np.array([1]),
            logprobs=np.zeros(2),
            reply="",
        )
    with pytest.raises(MooredError, match="1 tokens and 2 logprobs"):
        Completion(np.array([1]), np.zeros(2), FinishReason.STOP)


def test_reward_is_the_exact_sum_over_turns():
    assert trajectory(*[turn(reward=-0.1)] * 10).reward == -1.0  # naive summing gives -0.99...9


def test_an_errored_trajectory_has_no_reward():
    assert math.isnan(trajectory(turn(reward=1.0), stop=StopReason.ENV_ERROR).reward)
    assert trajectory(turn(reward=1.0), stop=StopReason.TURN_LIMIT).reward == 1.0


def test_termination_truncation_and_error_are_different_facts():
    facts = {stop: (stop.is_truncation, stop.is_error) for stop in StopReason}
    assert facts == {
        StopReason.DONE: (False, False),
        StopReason.TURN_LIMIT: (True, False),
        StopReason.CONTEXT_LIMIT: (True, False),
        StopReason.ENV_ERROR: (False, True),
        StopReason.SAMPLER_ERROR: (False, True),
    }


def test_a_group_gives_one_reward_a_trajectory():
    rewards = group(trajectory(turn(reward=1.0)), trajectory(turn(), turn(reward=0.5))).rewards
    assert rewards.tolist() == [1.0, 0.5]


def test_members_of_a_group_share_their_first_prompt():
    with pytest.raises(MooredError, match="trajectory 1 has another first prompt"):
        group(trajectory(turn((1, 2))), trajectory(turn((1, 3))))
    same_ids = [turn(seen=picture(colour)) for colour in ("red", "blue")]
    with pytest.raises(MooredError, match="another first prompt"):
        group(*map(trajectory, same_ids))
    group(trajectory(turn(seen=picture("red"))), trajectory(turn(seen=picture("red"))))


def test_a_group_is_one_task():
    with pytest.raises(MooredError, match="task 1"):
        group(trajectory(turn()), trajectory(turn(), task_seed=1))
    with pytest.raises(MooredError, match="no trajectories"):
        group()


def test_a_trajectory_that_failed_before_its_first_turn_may_be_in_a_group():
    failed = trajectory(stop=StopReason.SAMPLER_ERROR)
    assert np.isnan(group(failed, trajectory(turn(reward=2.0))).rewards).tolist() == [True, False]


def test_digests_tell_the_borders_of_parts_and_the_shape_of_images():
    def digest(*parts: TextPart | ImagePart) -> str:
        return messages_digest([Message("user", list(parts))])

    def text(words: str) -> TextPart:
        return {"type": "text", "text": words}

    def image(width: int, height: int) -> ImagePart:
        return {"type": "image", "image": Image.new("L", (width, height))}

    assert digest(text("a"), text("bc")) != digest(text("ab"), text("c"))
    assert digest(image(1, 4)) != digest(image(2, 2))


def palette_image(*colours: tuple[int, int, int]) -> Image.Image:
    """Two pixels that are indices 0 and 1 of a palette."""
    image = Image.new("P", (2, 1))
    image.putpalette([channel for colour in colours for channel in colour])
    image.putpixel((1, 0), 1)
    return image


def test_palette_images_are_told_apart_by_their_colours():
    red, green, blue = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    pictures = [palette_image(red, green), palette_image(red, blue), palette_image(red, green)]
    assert pictures[0].tobytes() == pictures[1].tobytes()  # the same indices
    keys = [Prompt(np.array([1]), (picture,)).key for picture in pictures]
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]
    rgba = pictures[0].convert("RGBA")
    assert Prompt(np.array([1]), (rgba,)).key == keys[0]


def test_an_array_is_no_image():
    with pytest.raises(MooredError, match="PIL image, got ndarray"):
        _ = Prompt(np.array([1]), (np.zeros((2, 2, 3)),)).key


def test_an_action_with_its_end_is_not_the_beginning_of_a_longer_one():
    up, bar, right, close = 5, 6, 7, 8
    short, long = [1, up, close, 2], [1, up, bar, right, close, 2]
    turns = [
        Turn(
            prompt=Prompt(np.array([1])),
            completion_ids=np.array(ids),
            logprobs=np.zeros(len(ids)),
            answer_span=span,
            reply="",
        )
        for ids, span in ((short, (1, 2)), (long, (1, 4)), (short, None))
    ]
    assert [turn.ended_action_ids.tolist() for turn in turns] == [
        [up, close],
        [up, bar, right, close],
        [],
    ]


def test_the_newest_observation_begins_inside_the_prompt():
    with pytest.raises(MooredError, match="observation_start 3 lies outside the 3"):
        Turn(
            prompt=Prompt(np.arange(3)),
            completion_ids=np.zeros(0, dtype=np.int64),
            logprobs=np.zeros(0),
            reply="",
            observation_start=3,
        )
