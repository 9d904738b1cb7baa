"""Every test that takes a `folder` runs on each real model at hand, and tells figures beside its outcome."""

import json
from collections.abc import Callable

import pytest
import torch
from real_parts import ABSENT, model_folders


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "folder" in metafunc.fixturenames:
        found = model_folders()
        absent = [pytest.param(None, marks=pytest.mark.skip(reason=ABSENT), id="none")]
        metafunc.parametrize(
            "folder", found or absent, ids=[path.name for path in found] or None, scope="session"
        )


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Numbers that belong into the table of outcomes."""

    def tell(**numbers: float) -> None:
        for name, value in numbers.items():
            record_property(name, json.dumps(round(float(value), 6)))

    return tell


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
