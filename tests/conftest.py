"""One thread (two on a busy core are far slower), no deadlines, one case of four of a wide test in `make test`, and GPU
tests only where there is a GPU."""

import importlib.util
from collections import Counter

import pytest
import torch

torch.set_num_threads(1)
if importlib.util.find_spec("hypothesis"):  # a machine with a GPU may lack it
    from hypothesis import settings

    settings.register_profile("whet", deadline=None)  # a busy machine is no failure
    settings.load_profile("whet")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not ask for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("wide"):
            function = item.nodeid.partition("[")[0]
            row, column = divmod(seen[function], 4)
            # a diagonal, so that every value of the last parameter has its turn
            if column != row % 4:
                item.add_marker(pytest.mark.slow)
            seen[function] += 1
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
