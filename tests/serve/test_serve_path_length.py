"""How many files and functions of bytetx a request runs, from the application to its answer."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from path_lengths import path_length
from serving import InProcess

from bytetx.serve.loading import close_models, load_models
from bytetx.serve.settings import ServeSettings, model_sources


def test_embed_is_short(checkpoints: dict[str, Path]) -> None:
    """The bounds are those of today, rounded up a little."""

    settings = ServeSettings(model_sources([str(checkpoints["embedder"])]), device="cpu")
    served = load_models(settings)

    def make() -> Callable[[], object]:
        app = InProcess(settings, served)

        def post() -> None:
            assert app.post("/embed", {"inputs": ["a fox"]}).status_code == 200

        return post

    files, functions, _ = path_length(make)
    asyncio.run(close_models(served))
    assert files <= 37, files
    assert functions <= 234, functions
