"""How the gated delta rule cuts sequences; apart from it, because planning imports no torch."""

CHUNK = 64  # tokens, whose triangular system is solved at once
