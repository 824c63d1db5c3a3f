"""What is read off runs and rollout files: diagnosis, advice, and the page that shows them."""
