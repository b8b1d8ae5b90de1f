"""What all tests share: none leaves a name behind that it registered."""

import pytest


@pytest.fixture(autouse=True)
def _registries_as_they_were():
    from logitclip.clip import CLIPS, PENALTIES
    from logitclip.data import AUGMENTS, DATASETS
    from logitclip.losses import LOSSES
    from logitclip.methods import METHODS
    from logitclip.models import MODELS
    from logitclip.noise import NOISES

    registries = (LOSSES, CLIPS, PENALTIES, NOISES, DATASETS, AUGMENTS, MODELS, METHODS)
    before = [set(registry) for registry in registries]  # looking at them also loads what registers itself
    yield
    for registry, names in zip(registries, before, strict=True):
        for name in set(registry) - names:
            del registry._entries[name]
