"""FSDP2: the weights of a model in shards, one for each rank."""
