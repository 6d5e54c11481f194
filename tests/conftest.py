"""Fixtures of more than one test module."""

import pytest
from helpers import Clusters


@pytest.fixture(scope="module")
def clusters():
    """Local clusters, one at a time, ended with the module: a process has but one connection."""
    clusters = Clusters()
    yield clusters
    clusters.close()
