import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run, and no limit of time for one: other work may slow the machine.
settings.load_profile("ci")

# What a shell starts in the background ignores Ctrl-C, and hands that on to all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The modules that tests share stand beside them; benchmarks are scripts.
TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS)]
sys.path += [str(TESTS.parent / "benchmarks")]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub of our own, the only one in reach, and an empty working folder to download to."""
    from hub_server import Hub

    constants = "huggingface_hub.constants"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / "cache"))
    with Hub() as hub:
        path = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(f"{constants}.ENDPOINT", hub.url)  # what HF_ENDPOINT sets
        monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", hub.url + path)
        yield hub


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Each small model, saved; tests change copies alone."""
    from small_models import SMALL, small_model

    from statecut.models.checkpoint import save

    root = tmp_path_factory.mktemp("models")
    for name, config in SMALL.items():
        save(small_model(config), root / name)
    return root
