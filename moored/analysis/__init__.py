"""Analysis of runs and rollout files: diagnosis, advice, and the page that shows them."""
