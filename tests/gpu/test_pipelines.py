"""The lifecycle under pipelines on four GPUs; the tests are in tests/pipelines.py."""

from tests import pipelines
from tests.ranks import NcclTest, on_ranks

TestPipelines = on_ranks(pipelines.TestPipelines, NcclTest, module=__name__)
