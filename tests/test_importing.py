import gc

from jaxllm.importing import without_collections


def test_nothing_is_collected_while_modules_are_imported():
    assert gc.isenabled()
    with without_collections():
        assert not gc.isenabled()
        with without_collections():  # an import inside of another one
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
