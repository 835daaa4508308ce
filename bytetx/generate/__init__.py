"""The engine of generation: scheduler, KV pages, model runner, sampler, output processor."""
