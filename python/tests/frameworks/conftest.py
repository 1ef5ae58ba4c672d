"""Models that tests of transformers share."""

import pytest

NAMES = ["llama", "llama4", "mistral", "gemma2", "gpt_oss"]


@pytest.fixture(scope="module", params=NAMES)
def pair(request):
    return _models(request.param)


@pytest.fixture(scope="module")
def llama():
    return _models("llama")


@pytest.fixture(scope="module")
def llama4():
    return _models("llama4")


def _models(name):
    from small_models import config_of, models

    return models(config_of(name))
