"""Tests with packages of others, which `make test-integrations` installs into an environment of their own."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a package that this environment does not have."""
    for item in items:
        for mark in item.iter_markers("needs"):
            for package in mark.args:
                if importlib.util.find_spec(package) is None:
                    item.add_marker(
                        pytest.mark.skip(reason=f"{package} is not installed here: make test-integrations")
                    )
