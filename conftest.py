"""What tests and doctests share: names that one of them registers are removed again."""

import pytest


@pytest.fixture(autouse=True)
def _registries_as_they_were():
    from logitclip.runs.config import registries
    from logitclip.theory import BOUNDS

    before = {kind: set(registry) for kind, registry in registries().items()}  # iterating also loads their modules
    bounds = dict(BOUNDS)
    yield
    for kind, registry in registries().items():
        for name in set(registry) - before[kind]:
            del registry._entries[name]
    BOUNDS.clear()
    BOUNDS.update(bounds)
