"""Where things run: samplers write replies, learners score and update."""
