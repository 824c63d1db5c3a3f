"""Any environment behind an OpenEnv server, played in text.

In: the server's address, and how an answer becomes an action. Out: a moored environment whose task
seed is the server's seed. A server that is gone, slow or talks nonsense costs the episode.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moored.envs.adapters.turns import SHARE_STARTS, TextGame, draw_start
from moored.envs.base import StepResult, check_address, encodable
from moored.envs.serving.wire import expect_mapping, expect_number
from moored.errors import EnvError, require_packages
from moored.json_http import HttpError, JsonClient
from moored.names import import_object
from moored.reply import parse_reply
from moored.types import Message

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

MAX_ANSWER_CHARS = 8192
MAX_MESSAGE_BYTES = 64 << 20
MAX_SHOWN_CHARS = 16_000
NUM_PROBES = 8
"""Resets that find out whether all starts are equal."""
CONVERTERS: Mapping[str, Callable[[str], object]] = {
    "string": str,
    "integer": int,
    "number": lambda text: expect_number("answer", float(text)),
    "boolean": lambda text: {"true": True, "false": False}[text.strip().lower()],
}
"""What turns an answer into a field of an action, by the type in the server's schema."""


class OpenEnv(TextGame):
    """An environment behind an OpenEnv server, over its WebSocket (needs `moored[serve]`).

    Reward: the server's own; −0.1 for a malformed reply, which does not reach the server, and for
    an answer that the server's schema refuses. `done` terminates the episode, `max_turns` truncates
    it. Success is an episode that is done with a total reward of at least `success_reward`.

    Options:
        url: the server's address, such as "http://127.0.0.1:8000".
        action_field: the field of the action that the answer fills. By default the only field in
            the server's schema; where there are several, the answer is a JSON object.
        observation_field: the field that is shown. By default all, as JSON.
        rules: the system prompt: goal, observations, actions, rewards.
        reset_options: further keywords of the server's reset.
        max_turns (10): replies in an episode.
        success_reward (1.0): total reward from which a finished episode counts as a success.
        oracle: a function "module:name" from the observation's fields to a good answer.
        fixed_start: True when all seeds start alike, so that the splits share the one task. None
            (default) finds out by 8 resets.
        is_stochastic (False): True for a server with noise that its seed does not determine.
        timeout_s (30.0): an answer of the server that takes longer is given up.
        format_penalty (−0.1): reward of a malformed reply; where steps cost more, set it to at most
            that of the dearest; `moored check-env` compares them.

    A task is a start state: `task_seed` chooses the seed of the server's reset. OpenEnv has no
    other seed, so chance that the server draws later is the same in all episodes of a group.
    """

    name: ClassVar[str] = "openenv"
    main_option: ClassVar[str] = "url"

    def __init__(
        self,
        *,
        url: str,
        action_field: str = "",
        observation_field: str = "",
        rules: str = "",
        reset_options: Mapping[str, object] | None = None,
        max_turns: int = 10,
        success_reward: float = 1.0,
        oracle: str | Callable[[Mapping[str, Any]], str] | None = None,
        fixed_start: bool | None = None,
        is_stochastic: bool = False,
        timeout_s: float = 30.0,
        format_penalty: float = -0.1,
    ) -> None:
        self.check_options(max_turns=max_turns, timeout_s=timeout_s)
        check_address("openenv", url)
        require_packages("environment openenv", ("websockets",))
        self.max_turns = max_turns
        self.is_stochastic = is_stochastic
        self.malformed_reward = format_penalty
        self._url, self._timeout_s = url, timeout_s
        self._action_field, self._observation_field = action_field, observation_field
        self._rules = rules
        self._reset_options = dict(reset_options or {})
        self._success_reward = success_reward
        self._oracle: Any = import_object(oracle) if isinstance(oracle, str) else oracle
        self._fixed_start = fixed_start
        self._session = OpenEnvSession(url, timeout_s)
        self._is_connected = False
        self._fields: Mapping[str, Mapping[str, Any]] | None = None
        self._start_seeds: dict[int, tuple[int, bytes]] = {}
        """Task seed -> the server's seed, and a digest of the first observation."""

    def check_available(self) -> None:
        self._fields = fetch_action_schema(self._url, self._timeout_s)

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._over = True
        if self._fields is None:
            self._fields = fetch_action_schema(self._url, self._timeout_s)
        self._seed = self._draw_start(task_seed)
        self._actions: list[Mapping[str, object]] = []
        self._is_connected = True
        self._total = 0.0
        return self.open_episode(self._rules_text(), self._shown(self._observed))

    def step(self, reply: str) -> StepResult:
        self.check_running("step")
        action = self._read_action(parse_reply(reply).answer)
        self._turn += 1
        if action is None:
            return self._finish(self.malformed_reward, is_valid=False)
        try:
            self._catch_up()
            self._observed = self._session.ask("step", action)
        except ActionRefused:
            return self._finish(self.malformed_reward, is_valid=False)
        except EnvError:
            self._over = True
            raise
        self._actions.append(action)
        self._total += self._observed.reward
        return self._finish(self._observed.reward, is_done=self._observed.is_done)

    def oracle(self) -> str:
        self.check_running("oracle")
        if self._oracle is None:
            raise EnvError(
                "openenv: no good answer is known; give oracle=, a function from the "
                "observation's fields to the text of an answer"
            )
        return str(self._oracle(self._observed.observation))

    def close(self) -> None:
        self._over = True
        self._is_connected = False
        self._session.close()

    def __getstate__(self) -> dict[str, object]:
        # A copy plays in a session of its own, where `_catch_up` repeats the actions so far.
        session = OpenEnvSession(self._url, self._timeout_s)
        return {**self.__dict__, "_session": session, "_is_connected": False}

    def _draw_start(self, task_seed: int) -> int:
        """Reset the server to a start of the task's split; its seed."""
        if task_seed in self._start_seeds:
            seed, digest = self._start_seeds[task_seed]
            if _digest(self._begin(seed)) != digest:
                raise EnvError(
                    f"openenv: {self._url} gave another first observation for the same seed, so "
                    f"the episodes of a group would differ; it must draw its start from `seed`"
                )
            return seed
        if self._fixed_start is None:
            self._fixed_start = len({self._begin(seed) for seed in range(NUM_PROBES)}) == 1
        seed, text = draw_start(
            task_seed,
            self._draw,
            lambda start: start[1],
            is_fixed=self._fixed_start,
            source=f"openenv: {self._url}",
            remedy=SHARE_STARTS,
        )
        self._start_seeds[task_seed] = seed, _digest(text)
        return seed

    def _draw(self, rng: random.Random) -> tuple[int, str]:
        seed = rng.getrandbits(31)
        return seed, self._begin(seed)

    def _begin(self, seed: int) -> str:
        self._observed = self._session.ask("reset", {"seed": seed, **self._reset_options})
        return self._shown(self._observed)

    def _catch_up(self) -> None:
        """In a copy: play the actions so far in a session of its own."""
        if self._is_connected:
            return
        self._begin(self._seed)
        for action in self._actions:
            self._session.ask("step", action)
        self._is_connected = True

    def _read_action(self, answer: str | None) -> Mapping[str, object] | None:
        """The action an answer stands for; None when it is malformed."""
        if answer is None or len(answer) > MAX_ANSWER_CHARS:
            return None
        fields = self._fields or {}
        field = self._action_field or (next(iter(fields)) if len(fields) == 1 else "")
        try:
            if field:
                convert = CONVERTERS.get(_kind_of(fields.get(field, {})), json.loads)
                return {field: convert(answer)}
            action = json.loads(answer)
        except (ValueError, KeyError, RecursionError):
            return None
        return action if isinstance(action, dict) else None

    def _finish(self, reward: float, *, is_done: bool = False, is_valid: bool = True) -> StepResult:
        shown = self._shown(self._observed)
        success = is_done and self._total >= self._success_reward
        return self.end_turn(
            reward, shown, closing=shown, terminated=is_done, success=success, is_valid=is_valid
        )

    def _shown(self, observed: Observed) -> str:
        """What the model sees of an observation."""
        found: object = observed.observation
        if self._observation_field:
            found = observed.observation.get(self._observation_field)
            if found is None:
                known = ", ".join(observed.observation) or "none"
                raise EnvError(
                    f"openenv: observations have no field {self._observation_field!r}; they have "
                    f"{known}"
                )
        text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
        return encodable(text[:MAX_SHOWN_CHARS])

    def _rules_text(self) -> str:
        fields = ", ".join(self._fields or {})
        form = f"the action's {self._action_field or fields}"
        if not self._action_field and len(self._fields or {}) != 1:
            form = f"the action as a JSON object ({fields})"
        return (
            f"{self._rules or 'Act in the environment, and earn as much reward as you can.'}\n"
            f"Between the answer tags write {form}. You have at most {self.max_turns} turns."
        )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _kind_of(schema: Mapping[str, Any]) -> str:
    """The type of a field; of one that may be null too, the other."""
    kinds = [part.get("type") for part in (schema, *schema.get("anyOf", ()))]
    return next((kind for kind in kinds if kind not in (None, "null")), "string")


class ActionRefused(EnvError):
    """An action that does not fit the server's schema."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What the server answered to a reset or a step."""

    observation: Mapping[str, Any]
    reward: float
    """0 where the server gives none."""
    is_done: bool


class OpenEnvSession:
    """A connection, opened at the first message and again after a failure."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._socket: ClientConnection | None = None
        self._closing = ExitStack()

    def ask(self, kind: str, data: Mapping[str, object]) -> Observed:
        """Send a `reset` or a `step`; what goes wrong is an EnvError, and ends the connection."""
        from websockets.sync.client import connect

        try:
            if self._socket is None:
                connection = connect(
                    self._url.replace("http", "ws", 1) + "/ws",
                    open_timeout=self._timeout_s,
                    close_timeout=1.0,
                    max_size=MAX_MESSAGE_BYTES,
                    proxy=None,
                )
                self._socket = self._closing.enter_context(connection)
            self._socket.send(json.dumps({"type": kind, "data": data}))
            return _observed(json.loads(self._socket.recv(timeout=self._timeout_s)))
        except ActionRefused:
            raise
        except Exception as error:  # websockets, sockets and JSON raise many kinds
            self.close()
            text = str(error) or type(error).__name__
            if isinstance(error, TimeoutError):
                text = f"no answer within {self._timeout_s:g} s"
            raise EnvError(f"openenv: {self._url}: {text}") from error

    def close(self) -> None:
        """End the session; a server that is gone is left alone."""
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(Exception):  # whatever a broken connection raises, it is closed
                socket.send(json.dumps({"type": "close"}))
            with suppress(Exception):
                self._closing.close()


def _observed(answer: object) -> Observed:
    fields = expect_mapping(answer)
    data = expect_mapping(fields.get("data"))
    if fields.get("type") == "error":
        kind = ActionRefused if data.get("code") == "VALIDATION_ERROR" else EnvError
        raise kind(f"the server says: {data.get('message')!s:.200}")
    if fields.get("type") != "observation" or not isinstance(data.get("done"), bool):
        raise EnvError(f"an observation was expected, got {answer!r:.80}")
    reward = data.get("reward")
    return Observed(
        observation=expect_mapping(data.get("observation")),
        reward=0.0 if reward is None else expect_number("reward", float(reward)),
        is_done=data["done"],
    )


def fetch_action_schema(url: str, timeout_s: float) -> Mapping[str, Mapping[str, Any]]:
    """The fields of an action, from the server's `/schema`."""
    client = JsonClient(url, api_key=None, timeout_s=timeout_s)
    try:
        schema = expect_mapping(client.get("/schema"))
    except HttpError as error:
        raise EnvError(f"openenv: {url}: {error.with_remedy()}") from error
    finally:
        client.close()
    fields = expect_mapping(expect_mapping(schema.get("action")).get("properties", {}))
    return {name: expect_mapping(kind) for name, kind in fields.items() if name != "metadata"}
