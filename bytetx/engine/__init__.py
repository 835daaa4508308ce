"""Who runs when: requests, the token-budget scheduler, and the runner that drives a Transformer."""
