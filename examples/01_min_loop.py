"""The whole idea in one file: roll out, measure, select, update, on the package's own primitives.

A GRPO loop on single-turn Sokoban with the embedded `nano`, nothing hidden. The real loop
(`moored train`) adds configuration, minibatches, a critic, checkpoints and a run log.

Run: python examples/01_min_loop.py [--steps 3] [--no-filter]
"""

import argparse
from functools import partial

import numpy as np

from moored.algo import grpo, select_groups
from moored.config import load_config
from moored.diagnostics import cross_score, first_turn_pairs, information
from moored.engine.build import build_engine
from moored.envs.mix import make_env
from moored.rollout.episodes import Task, roll_out
from moored.training.samples import LossSample, build_samples, token_weights

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--steps", type=int, default=3)
arguments.add_argument("--groups", type=int, default=4, help="P, prompts per step")
arguments.add_argument("--size", type=int, default=8, help="G, rollouts per prompt")
arguments.add_argument("--no-filter", action="store_true")
options = arguments.parse_args()

config = load_config(
    {
        "model": "nano",
        "engine": {"device": "cpu"},
        "optimizer": {"lr": 2e-4},
        "algorithm": {"name": "grpo", "entropy_coef": 0.03, "kl_coef": 0.0},
        "rollout": {"max_response_tokens": 80, "max_context": 1024},
    }
)
engine = build_engine(config)
make_sokoban = partial(make_env, "sokoban", max_turns=1, max_actions_per_turn=10)

for step in range(1, options.steps + 1):
    # 1 plan, 2 roll out: one group is one prompt played `size` times.
    tasks = [
        Task(
            group_id=i,
            env="sokoban",
            make_env=make_sokoban,
            task_seed=1000 * step + i,
            episode_seeds=tuple(range(options.size)),
        )
        for i in range(options.groups)
    ]
    groups = roll_out(tasks, engine=engine, options=config.rollout, seed=(0, step))

    # 3 measure, before the filter: does reasoning still depend on its prompt?
    pairs = first_turn_pairs(groups, seed=step)
    report = information(cross_score(pairs, engine.scorer.score), pairs.columns, pairs.lengths)

    # 4 select the prompts whose rollouts differ in reward.
    rewards = np.stack([group.rewards for group in groups])
    selection = select_groups(rewards, rule="none" if options.no_filter else "top_p")

    # 5 advantages, 6 samples, 7 update: each sampled token brings its advantage, its weight in the
    # policy loss, and its share in the means of entropy and KL.
    advantages = grpo(rewards).ravel()
    samples = [s for s in build_samples(groups) if s.group in set(selection.kept.tolist())]
    weights, shares = (
        token_weights(samples, how, max_length=config.rollout.max_response_tokens)
        for how in ("seq_mean_token_mean", "token_mean")
    )
    batch = [
        LossSample(
            sample=sample,
            advantages_T=np.where(sample.loss_mask_T, advantages[sample.trajectory], 0.0),
            weights_T=weights_T,
            mean_weights_T=shares_T,
        )
        for sample, weights_T, shares_T in zip(samples, weights, shares, strict=True)
    ]
    stats = next(engine.learner.step([batch])) if batch else {"grad_norm": 0.0}

    # 8 make the learner's weights the sampler's.
    engine.publish()

    won = np.mean([t.success for group in groups for t in group.trajectories])
    print(
        f"step {step}: success {won:.2f}, kept {selection.kept_fraction:.2f}, retrieval "
        f"{report.retrieval_accuracy:.2f} (chance {1 / report.num_prompts:.2f}), MI "
        f"{report.mi_estimate:.2f}, {report.regime}, gradient {stats['grad_norm']:.2f}"
    )
