import pytest

from tests.media.models import make_model


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("vision"))
