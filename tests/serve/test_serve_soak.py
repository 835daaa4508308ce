"""The soak of serve_soak.py, short: answers and what is left in the server, not memory."""

import pytest
import serve_soak


@pytest.mark.parametrize("frontends", ["1", "2"])
def test_a_short_storm(frontends: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_soak.main(["--requests", "200", "--frontends", frontends]) == 0
    assert '"num_requests": 200' in capsys.readouterr().out
