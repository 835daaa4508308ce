"""One door per operation: argument checks, choice of kernel, and the reference in plain torch."""
