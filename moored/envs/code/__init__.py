"""DeepCoder: write a program that passes hidden tests; programs run in a sandbox."""
