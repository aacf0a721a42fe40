"""The partial-backward scope on four Gloo ranks; the tests are in tests/partial_backwards.py."""

from tests import partial_backwards
from tests.ranks import GlooTest, on_ranks

TestPartialBackwards = on_ranks(partial_backwards.TestPartialBackwards, GlooTest, module=__name__)
