"""The records everything else uses: Message, Completion, Turn, Trajectory, Group, Selection.

What the sampler emitted is recorded once, here; nothing downstream re-tokenises.
Shape legend: P groups, G trajectories in a group.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, TypedDict

import numpy as np

from moored.errors import MooredError

Role = Literal["system", "user", "assistant"]
Span = tuple[int, int]
"""Half-open token range [start, stop)."""


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    type: Literal["image"]
    image: object
    """A PIL image."""


Content = str | list[TextPart | ImagePart]
"""Message content as Hugging Face chat templates take it: a string, or text and image parts."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; `content` is a string or a list of text and image parts."""

    role: Role
    content: Content

    @property
    def text(self) -> str:
        """The text alone, image parts left out."""
        return content_text(self.content)

    @property
    def images(self) -> tuple[object, ...]:
        """The images in order."""
        return content_images(self.content)

    def to_dict(self) -> dict[str, object]:
        """The dict a Hugging Face chat template takes."""
        return {"role": self.role, "content": self.content}


def content_text(content: Content) -> str:
    """Join the text parts of a message content."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def content_images(content: Content) -> tuple[object, ...]:
    """List the images of a message content in order."""
    if isinstance(content, str):
        return ()
    return tuple(part["image"] for part in content if part["type"] == "image")


def messages_digest(messages: Sequence[Message]) -> str:
    """SHA-256 over roles, text and pixels: equal digests mean the model sees the same input."""
    sha = hashlib.sha256()
    for message in messages:
        parts = message.content
        if isinstance(parts, str):
            parts = [TextPart(type="text", text=parts)]
        sha.update(f"{message.role}\x00{len(parts)}\x00".encode())
        for part in parts:
            data = part["text"].encode() if part["type"] == "text" else _image_bytes(part["image"])
            sha.update(f"{part['type']}\x00{len(data)}\x00".encode())
            sha.update(data)
    return sha.hexdigest()


def _image_bytes(image: object) -> bytes:
    pixels: Any = image
    if not (isinstance(getattr(image, "mode", None), str) and hasattr(image, "tobytes")):
        raise MooredError(f"an image part must hold a PIL image, got {type(image).__name__}")
    if pixels.mode in ("P", "PA"):
        pixels = pixels.convert("RGBA")  # indices mean nothing without their palette
    return f"{pixels.mode}{pixels.size}".encode() + pixels.tobytes()


@dataclass(frozen=True, eq=False)  # no slots, so that the key can be kept
class Prompt:
    """What a model conditions on: token ids, and the images they refer to, in order.

    Two prompts are equal exactly when ids and images are.
    """

    ids: np.ndarray
    images: tuple[object, ...] = ()

    @cached_property
    def key(self) -> bytes:
        """Equal exactly for prompts that are the same to the model."""
        sha = hashlib.sha256(np.ascontiguousarray(self.ids, dtype=np.int64).tobytes())
        for image in self.images:
            sha.update(_image_bytes(image))
        return sha.digest()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Prompt) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def then(self, *ids: np.ndarray, images: tuple[object, ...] = ()) -> Prompt:
        """This prompt, more token ids, and the images that those refer to."""
        return Prompt(np.concatenate([self.ids, *ids]), (*self.images, *images))

    def continues(self, earlier: Prompt) -> bool:
        """True when this prompt begins with all tokens and images of an earlier one."""
        length, num_images = len(earlier.ids), len(earlier.images)
        if len(self.ids) < length or len(self.images) < num_images:
            return False
        if not (self.ids[:length] == earlier.ids).all():
            return False
        return _same_images(self.images[:num_images], earlier.images)


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """A prompt, and continuations whose tokens are to be scored after it."""

    prompt: Prompt
    continuations: Sequence[np.ndarray]
    images: Sequence[tuple[object, ...]] | None = None
    """Images that each continuation refers to, in order, e.g. those of later observations; None:
    all images are in the prompt."""


class FinishReason(StrEnum):
    """Why the sampler stopped writing one reply."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    """There is no reply: the completion has no tokens, and its `error` says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """All a Sampler returns for one request."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    policy_version: int = 0
    error: str = ""
    """Why there is no reply."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise MooredError(
                f"a completion needs one logprob per token, got {len(self.token_ids)} tokens "
                f"and {len(self.logprobs)} logprobs"
            )


class StopReason(StrEnum):
    """Why a trajectory ended. Termination, truncation and error are different facts."""

    DONE = "done"
    """The task itself was over: the environment terminated the episode."""
    TURN_LIMIT = "turn_limit"
    """Turns or actions ran out: the environment truncated the episode."""
    CONTEXT_LIMIT = "context_limit"
    ENV_ERROR = "env_error"
    SAMPLER_ERROR = "sampler_error"

    @property
    def is_truncation(self) -> bool:
        return self in (StopReason.TURN_LIMIT, StopReason.CONTEXT_LIMIT)

    @property
    def is_error(self) -> bool:
        return self in (StopReason.ENV_ERROR, StopReason.SAMPLER_ERROR)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Turn:
    """One reply: its prompt, its tokens, its reward."""

    prompt: Prompt
    """Everything before the reply, earlier turns with their observations and images included."""
    completion_ids: np.ndarray
    logprobs: np.ndarray
    think_span: Span | None = None
    """Reasoning tokens inside `completion_ids`, tags excluded; None when the tags are missing."""
    answer_span: Span | None = None
    reply: str
    seen: Content = ""
    """Content of the user message this turn answers."""
    observation_start: int | None = None
    """Where that message begins in `prompt.ids`: the tokens before it are the history. None when
    the recorder does not know; observation swap then leaves the turn out."""
    reward: float = 0.0
    penalty: float = 0.0
    """The part of `reward` that is for the form of the reply and not for the task; 0 or less."""
    is_valid: bool = True
    policy_version: int = 0

    def __post_init__(self) -> None:
        if len(self.completion_ids) != len(self.logprobs):
            raise MooredError(
                f"a turn needs one logprob per sampled token, got {len(self.completion_ids)} "
                f"tokens and {len(self.logprobs)} logprobs"
            )
        start = self.observation_start
        if start is not None and not 0 <= start < max(len(self.prompt.ids), 1):
            raise MooredError(
                f"observation_start {start} lies outside the {len(self.prompt.ids)} prompt tokens"
            )
        for name, span in (("think_span", self.think_span), ("answer_span", self.answer_span)):
            if span is not None and not 0 <= span[0] <= span[1] <= len(self.completion_ids):
                raise MooredError(
                    f"{name} {span} lies outside the {len(self.completion_ids)} sampled tokens"
                )

    @property
    def reasoning_ids(self) -> np.ndarray:
        """Tokens between the think tags; empty when there is no reasoning."""
        start, stop = self.think_span or (0, 0)
        return self.completion_ids[start:stop]

    @property
    def action_ids(self) -> np.ndarray:
        """Tokens inside the answer tags; empty when there is no answer."""
        start, stop = self.answer_span or (0, 0)
        return self.completion_ids[start:stop]

    @property
    def ended_action_ids(self) -> np.ndarray:
        """The action and the token after it, which ends it: "U" must not be a part of "U || R"."""
        if self.answer_span is None:
            return self.completion_ids[:0]
        start, stop = self.answer_span
        return self.completion_ids[start : stop + 1]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trajectory:
    """One episode of one environment."""

    env: str
    task_seed: int
    episode_seed: int
    turns: tuple[Turn, ...]
    stop: StopReason
    success: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        """Sum over turns; NaN after an error, so that the group statistics leave it out."""
        if self.stop.is_error:
            return math.nan
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def task_reward(self) -> float:
        """The reward without penalties for malformed replies; NaN after an error."""
        if self.stop.is_error:
            return math.nan
        return math.fsum(turn.reward - turn.penalty for turn in self.turns)

    @property
    def is_valid(self) -> bool:
        """True when no reply was malformed."""
        return all(turn.is_valid for turn in self.turns)

    @property
    def num_turns(self) -> int:
        return len(self.turns)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Group:
    """One prompt rolled out G times. All members must have seen the same first prompt."""

    group_id: int
    env: str
    task_seed: int
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise MooredError(f"group {self.group_id} has no trajectories")
        first = next((t.turns[0] for t in self.trajectories if t.turns), None)
        for index, trajectory in enumerate(self.trajectories):
            if (trajectory.env, trajectory.task_seed) != (self.env, self.task_seed):
                raise MooredError(
                    f"group {self.group_id} is task {self.task_seed} of {self.env!r}, but "
                    f"trajectory {index} is task {trajectory.task_seed} of {trajectory.env!r}"
                )
            if trajectory.turns and first is not None:
                self._check_first_prompt(index, trajectory.turns[0], first)

    def _check_first_prompt(self, index: int, turn: Turn, first: Turn) -> None:
        if turn.prompt == first.prompt:
            return
        raise MooredError(
            f"group {self.group_id} ({self.env}, task {self.task_seed}): trajectory {index} has "
            f"another first prompt than the group's first; an environment must derive its first "
            f"messages from task_seed alone"
        )

    @property
    def rewards(self) -> np.ndarray:
        """(G,) trajectory rewards; NaN where a trajectory ended in an error."""
        return np.array([trajectory.reward for trajectory in self.trajectories])


def _same_images(a: Sequence[object], b: Sequence[object]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x is y or _image_bytes(x) == _image_bytes(y) for x, y in pairs)


def group_id_array(group_ids: Sequence[object] | np.ndarray) -> np.ndarray:
    """Group ids as a flat array: tuples stay whole, and 1 and "1" stay apart."""
    if isinstance(group_ids, np.ndarray):
        return group_ids
    kinds = {type(label) for label in group_ids}
    if len(kinds) == 1 and not issubclass(next(iter(kinds)), tuple):
        return np.asarray(group_ids)
    return np.fromiter(group_ids, dtype=object)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoreMatrix:
    """How likely M reasonings are under N prompts each: what MI is computed from."""

    logp_MN: np.ndarray
    """Log-likelihood per token of reasoning m under prompt j."""
    columns_M: np.ndarray
    """The prompt that each reasoning was written for."""
    blocks_M: np.ndarray
    """Which set of N prompts each reasoning was scored under."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Selection:
    """Which groups an update uses. Made by `moored.algo.select_groups`."""

    kept: np.ndarray
    """Sorted indices of kept groups."""
    scores: np.ndarray
    """(P,) one score per group."""
    labels: np.ndarray
    """(P,) the caller's id of each group; its position when no ids were given."""
    score: str
    rule: str
    value: float
    reward_stds: np.ndarray | None = None
    """(P,) sample std of the rewards in each group; None when the score is not of rewards."""

    @property
    def num_groups(self) -> int:
        return len(self.scores)

    @property
    def kept_fraction(self) -> float:
        return len(self.kept) / self.num_groups if self.num_groups else 0.0

    @property
    def weights(self) -> np.ndarray:
        """(P,) score / largest score: the `soft` action, which weights groups instead of cutting.

        All zero when no group has a positive score.
        """
        top = float(self.scores.max(initial=0.0))
        if top <= 0.0:
            return np.zeros(self.num_groups)
        return np.clip(self.scores / top, 0.0, 1.0)

    @property
    def group_mask(self) -> np.ndarray:
        """(P,) True for kept groups."""
        mask = np.zeros(self.num_groups, dtype=bool)
        mask[self.kept] = True
        return mask

    def row_mask(self, group_ids: Sequence[object] | np.ndarray) -> np.ndarray:
        """True for each row whose group is kept; `group_ids` gives the group of every row."""
        index = {label: position for position, label in enumerate(self.labels.tolist())}
        rows = group_id_array(group_ids).tolist()
        unknown = next((row for row in rows if row not in index), None)
        if unknown is not None:
            raise MooredError(
                f"row_mask was given group id {unknown!r}, which was not among the "
                f"{self.num_groups} groups that were scored"
            )
        return self.group_mask[[index[row] for row in rows]] if rows else np.zeros(0, dtype=bool)

    def metrics(self) -> dict[str, float]:
        """Numbers for the run log."""
        kept_scores = self.scores[self.kept]
        metrics = {
            "filter/num_groups": float(self.num_groups),
            "filter/num_kept": float(len(self.kept)),
            "filter/num_zero": float(np.count_nonzero(self.scores == 0.0)),
            "filter/kept_fraction": self.kept_fraction,
            "filter/score_mean": _mean(self.scores),
            "filter/score_max": float(self.scores.max()) if self.num_groups else 0.0,
            "filter/kept_score_mean": _mean(kept_scores),
        }
        if self.reward_stds is not None:
            metrics["filter/reward_std_mean"] = _mean(self.reward_stds)
            metrics["filter/kept_reward_std_mean"] = _mean(self.reward_stds[self.kept])
        return metrics


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
