"""Small models in folders, shared by the tests of audits."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.audit.made import save_bert, save_llama


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))
