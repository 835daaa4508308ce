"""Parts of both engines: step layouts, pinned buffers, streams, buckets and CUDA graphs."""
