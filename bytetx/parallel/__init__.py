"""Many GPUs: groups of ranks, what each of them holds, and how they talk."""
