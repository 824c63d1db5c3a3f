"""The filter in an asynchronous trainer: groups arrive one by one, each is answered at once.

There is no batch to sort, so the last 64 groups stand in for it. `finished_groups` replaces your
rollout workers and the `print` your update; the rest is what you would write.

Run: python examples/03_one_group_at_a_time.py [--groups 400]
"""

import argparse
from collections.abc import Iterator

import numpy as np

from moored.algo import StreamingFilter, grpo, reward_variance

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--groups", type=int, default=400)
options = arguments.parse_args()


def finished_groups(num: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Rewards of the 8 rollouts of one prompt at a time; a third of the prompts always fail."""
    rng = np.random.default_rng(seed)
    for _ in range(num):
        success_rate = rng.choice([0.0, 0.05, 0.5])
        rewards = (rng.random(8) < success_rate).astype(float)
        rewards[rng.random(8) < 0.02] = np.nan  # a rollout that failed has no reward
        yield rewards


stream = StreamingFilter(0.9, window=64)
batch: list[np.ndarray] = []
seen, kept = [], []
updates = 0
for number, rewards in enumerate(finished_groups(options.groups), start=1):
    seen.append(rewards)
    if stream.offer(rewards):
        kept.append(rewards)
        batch.append(rewards)
    if len(batch) == 32:
        advantages = grpo(np.stack(batch))  # (32, 8): advantages of the rollouts, to train on
        updates += 1
        size = np.abs(advantages).mean()
        print(f"update {updates} after {number} groups: mean |advantage| {size:.2f}")
        batch = []
    if number == options.groups // 2:
        # What your checkpoint would store: plain lists. A new filter continues from there.
        state = stream.state_dict()
        stream = StreamingFilter(0.9, window=64)
        stream.load_state_dict(state)

mass = reward_variance(kept).variances.sum() / reward_variance(seen).variances.sum()
print(f"kept {len(kept)} of {len(seen)} groups with {mass:.0%} of the reward variance")
