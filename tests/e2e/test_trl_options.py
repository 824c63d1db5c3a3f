"""With the filter off, training is that of plain TRL under its own options, looks included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.e2e.trl_runs import reward_length, train

pytest.importorskip("trl")
# TRL and what it imports give warnings that are not about our code.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("trl_offline")]


def reward_first_token(completion_ids, **_):
    return [float(ids[0] % 3) for ids in completion_ids]


OPTIONS: dict[str, dict[str, Any]] = {
    "several updates of a generation": {"rows": 4, "num_iterations": 2, "steps_per_generation": 2},
    "accumulation": {"accumulate": 2, "rows": 4},
    "reference that follows": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    "KL with importance weights": {"beta": 0.1, "use_bias_correction_kl": True},
    "high-entropy tokens": {"top_entropy_quantile": 0.2, "entropy_coef": 0.01},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.02},
    "truncated replies masked": {"mask_truncated_completions": True, "weight_decay": 0.1},
    "two-sided clipping": {"delta": 1.5, "num_iterations": 2},
    "off-policy mask": {"off_policy_mask_threshold": 0.5, "num_iterations": 2},
    "sequence ratios": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "batch scaling": {"scale_rewards": "batch"},
    "two rewards": {
        "reward": [
            reward_length,
            lambda completion_ids, **_: [ids[0] % 3 for ids in completion_ids],
        ],
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "gradient checkpointing": {"gradient_checkpointing": True},
    "no dropout": {"disable_dropout": True, "temperature": 0.7},
}
TIMES = ("step_time", "train_runtime", "per_second")


def trl_numbers(run: Any) -> list[dict[str, float]]:
    """What TRL itself logs, without times."""
    ours = ("filter/", "tokens/", "update/", "collapse")
    return [
        {k: v for k, v in row.items() if not k.startswith(ours) and not any(t in k for t in TIMES)}
        for row in run.log
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_with_the_filter_off_weights_and_logs_are_those_of_plain_trl(name, tmp_path):
    from moored.integrations.trl import CollapseOptions

    options: dict[str, Any] = {"rows": 8, "max_steps": 2, "rollout": None, "perturb": False}
    options |= {"reward": reward_first_token, "max_completion_length": 5, **OPTIONS[name]}
    plain = train(tmp_path, "KD", **options)
    watched = CollapseOptions(every=1, think_tags=None)
    ours = train(tmp_path, "KD", group_filter={"rule": "none"}, collapse=watched, **options)
    assert all(torch.equal(ours.weights[key], x) for key, x in plain.weights.items())
    assert trl_numbers(ours) == trl_numbers(plain)
    assert "collapse/measure_s" in ours.log[0]
