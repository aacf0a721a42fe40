"""Invocations of units on four Gloo ranks; see tests/invocations.py."""

from tests import invocations
from tests.ranks import GlooTest, on_ranks

TestInvocations = on_ranks(invocations.TestInvocations, GlooTest, module=__name__)
