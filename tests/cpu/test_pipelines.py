"""The lifecycle under pipelines on four Gloo ranks; the tests are in tests/pipelines.py."""

from tests import pipelines
from tests.ranks import GlooTest, on_ranks

TestPipelines = on_ranks(pipelines.TestPipelines, GlooTest, module=__name__)
