"""The partial-backward scope on four GPUs; the tests are in tests/partial_backwards.py."""

from tests import partial_backwards
from tests.ranks import NcclTest, on_ranks

TestPartialBackwards = on_ranks(partial_backwards.TestPartialBackwards, NcclTest, module=__name__)
