"""What both engines use: step layouts, pinned buffers, streams, buckets and CUDA graphs."""
