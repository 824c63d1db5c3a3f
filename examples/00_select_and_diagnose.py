"""The two halves of moored on made-up numbers: which groups to train on, and has it collapsed?

Run: python examples/00_select_and_diagnose.py
"""

import numpy as np

from moored.algo import advise, select_groups
from moored.diagnostics import information

rng = np.random.default_rng(0)

# Rewards of one rollout batch: 8 prompts, 16 trajectories each. Three prompts are mixed, the rest
# succeed or fail whatever the agent does.
solve_rate = np.array([0.5, 0.0, 0.3, 1.0, 0.0, 0.7, 0.0, 1.0])
rewards = (rng.random((8, 16)) < solve_rate[:, None]).astype(float)

selection = select_groups(rewards)  # top_p 0.9 of the reward variance
advice = advise(rewards)
print(f"train on prompts {selection.kept.tolist()} ({selection.kept_fraction:.0%} of the batch)")
print(f"advice: {advice.recommendation}; {advice.reasons[0]}")

# Cross-scores: log-likelihood of 64 reasonings (rows) under 16 prompts (columns). A healthy model
# finds a reasoning likelier under the prompt it was written for; a collapsed one does not.
columns = np.repeat(np.arange(16), 4)
lengths = np.full(64, 40)
template = rng.normal(-60, 3, (64, 1)) + rng.normal(0, 0.1, (64, 16))
healthy = template - 8 * (columns[:, None] != np.arange(16))

for name, logp in {"healthy": healthy, "collapsed": template}.items():
    report = information(logp, columns, lengths, bootstrap=1000, permutations=1000)
    interval, p = report.intervals["retrieval_accuracy"], report.p_values["retrieval_accuracy"]
    print(
        f"{name}: {report.regime}; a reasoning finds its prompt in {report.retrieval_accuracy:.0%} "
        f"of cases (95% interval {interval.low:.0%} to {interval.high:.0%}, chance "
        f"{1 / report.num_prompts:.0%}, p = {p:.3f}), H(Z|X) = "
        f"{report.conditional_entropy_est:.2f} nats per token"
    )
