"""Invocations of units on four GPUs; see tests/invocations.py."""

from tests import invocations
from tests.ranks import NcclTest, on_ranks

TestInvocations = on_ranks(invocations.TestInvocations, NcclTest, module=__name__)
