"""The engine of one-pass tasks: requests, the token-budget scheduler, the model runner."""
