"""The lengths of episodes that `moored plan` was asked for, whatever else is changed."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from moored.errors import EnvError

if TYPE_CHECKING:
    from moored.config import Config
    from moored.plan import Lengths
    from moored.plan.plan import LengthsOf


def as_given(
    config: Config, turns: int | None, prompt_tokens: int | None, reply_tokens: int | None
) -> LengthsOf:
    """What was given, and the longest that is allowed for the rest; advice is held to it, too."""
    from moored.plan import longest_lengths
    from moored.plan.seconds import PROMPT_TOKENS, check_lengths, most_turns

    prompt = prompt_tokens or PROMPT_TOKENS
    env_turns = _max_turns(config) if turns is None else turns

    def lengths_of(config: Config) -> Lengths:
        own = turns
        if own is None:
            own = min(env_turns, most_turns(config, prompt=prompt, reply=reply_tokens or 1))
        found = longest_lengths(config, prompt=prompt, turns=own, reply=reply_tokens)
        found = found if prompt_tokens is None else replace(found, prompt=prompt_tokens)
        check_lengths(config, found)
        return found

    return lengths_of


def _max_turns(config: Config) -> int:
    """Of the environment that has most."""
    from moored.envs.mix import EnvMix, is_foreign

    mix, most = EnvMix(config.env), 1
    try:
        for spec, make in zip(mix.specs, mix.makers, strict=True):
            if is_foreign(spec.name, spec.options):
                raise EnvError(
                    f"a plan runs no code that a configuration names, as {spec.name!r} does"
                )
            with closing(make()) as env:
                most = max(most, env.max_turns)
    except EnvError as error:
        # A run is often planned where it will not be made, and only its turns are needed.
        raise EnvError(f"{error}; to plan all the same, give --turns") from error
    return most
