"""One advantage step of verl's V1 trainer on real Ray and TransferQueue; prints its results.

Two groups of two sessions, one session in two outputs, and a row that verl adds to fill up: `a`
has rewards 1 and 0, `b` 1 and 1. Run as `python -m tests.e2e.verl_step`.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

KEYS = ["a_0_0", "a_1_0", "b_0_0", "b_0_1", "b_1_0", "pad_0_0"]
REWARDS = [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
LENGTHS = [3, 2, 3, 1, 2, 1]


def rows(rewards: list[float]) -> Any:
    import torch
    from tensordict import TensorDict  # pyright: ignore[reportMissingImports]
    from tensordict.tensorclass import NonTensorStack  # pyright: ignore[reportMissingImports]

    def nested(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    masks = [torch.ones(length, dtype=torch.long) for length in LENGTHS]
    masks[-1].zero_()
    scores = [torch.zeros(length) for length in LENGTHS]
    for row, reward in zip(scores, rewards, strict=True):
        row[-1] = reward
    return TensorDict(
        {
            "uid": NonTensorStack(*(key.split("_")[0] for key in KEYS)),
            "response_mask": nested(masks),
            "loss_mask": nested(masks),
            "rm_scores": nested(scores),
            **{
                name: nested([torch.zeros(length) for length in LENGTHS])
                for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob", "values")
            },
        },
        batch_size=len(KEYS),
    )


def make_trainer(estimator: str) -> Any:
    """The registered trainer, found by name, without its workers."""
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]
    from verl.trainer.ppo.v1 import (  # pyright: ignore[reportMissingImports]
        PPOTrainerSync,
        get_trainer_cls,
    )

    config = OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": "moored_sync"}},
            "algorithm": {
                "adv_estimator": estimator,
                "moored": {"rule": "nonzero"},
                "use_kl_in_reward": False,
                "gamma": 1.0,
                "lam": 1.0,
            },
            "actor_rollout_ref": {"rollout": {"n": 2}},
        }
    )

    def start(self: Any, config: Any) -> None:
        self.config, self.num_updates = config, 0

    def count(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        self.num_updates += 1
        return batch

    # Everything that needs workers.
    base: Any = PPOTrainerSync
    base.__init__, base._update_actor = start, count
    return get_trainer_cls("moored_sync")(config)


def step(trainer: Any, rewards: list[float], partition: str) -> dict[str, Any]:
    import transfer_queue as tq  # pyright: ignore[reportMissingImports]

    tags = [{"is_padding": key.startswith("pad")} for key in KEYS]
    batch = tq.kv_batch_put(keys=KEYS, partition_id=partition, fields=rows(rewards), tags=tags)
    metrics: dict[str, Any] = {}
    batch = trainer._compute_advantage(batch, metrics)
    trainer._update_actor(batch, metrics)
    fields = ["response_mask", "loss_mask", "advantages"]
    data = tq.kv_batch_get(keys=KEYS, partition_id=partition, select_fields=fields)
    tq.kv_clear(keys=KEYS, partition_id=partition)
    return {
        "mode": trainer.config.trainer.v1.trainer_mode,
        "keys": batch.keys,
        "metrics": metrics,
        "num_updates": trainer.num_updates,
        **{name: [row.tolist() for row in data[name].unbind()] for name in fields},
    }


def main() -> None:
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "moored.integrations.verl_trainer"
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray  # pyright: ignore[reportMissingImports]
    import transfer_queue as tq  # pyright: ignore[reportMissingImports]
    import verl  # noqa: F401  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=folder
        )
        tq.init()
        trainer = make_trainer("grpo")
        found = {
            "filtered": step(trainer, REWARDS, "filtered"),
            "empty": step(trainer, [1.0] * 6, "empty"),
            "soft": step(make_trainer("moored_soft_grpo"), REWARDS, "soft"),
        }
        tq.close()
        ray.shutdown()
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main()
