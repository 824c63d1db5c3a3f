"""From groups to an updated policy: samples, advantages, losses, metrics, stopping."""
