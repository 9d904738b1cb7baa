"""One thread (two on a busy core are far slower), no deadlines, and GPU tests only where there is a GPU."""

import importlib.util

import pytest
import torch

torch.set_num_threads(1)
if importlib.util.find_spec("hypothesis"):  # a machine with a GPU may lack it
    from hypothesis import settings

    settings.register_profile("whet", deadline=None)  # a busy machine is no failure
    settings.load_profile("whet")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
