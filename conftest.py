"""What tests and doctests share: names that one of them registers are removed again."""

import pytest


def pytest_configure(config):
    """Let pytest-randomly shuffle the tests, not reseed the global random state: that would hide who depends on it."""
    if hasattr(config.option, "randomly_reset_seed"):
        config.option.randomly_reset_seed = False


def pytest_terminal_summary(terminalreporter, config):
    """Print how to repeat the order of the tests: -q hides the head, which has it."""
    if hasattr(config.option, "randomly_seed"):
        terminalreporter.write_line(
            f"tests in random order; repeat it with --randomly-seed={config.option.randomly_seed}"
        )


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
