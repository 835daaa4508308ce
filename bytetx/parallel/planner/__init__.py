"""Which grid of GPUs for a model, a machine and its traffic: a cost model in plain Python."""
