"""Environment, marks and fixtures are those of the other tests."""

from tests.conftest import pytest_collection_finish, pytest_collection_modifyitems, tokenizer


__all__ = ["pytest_collection_finish", "pytest_collection_modifyitems", "tokenizer"]
