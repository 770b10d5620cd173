"""Every test of ptxrun runs twice: instructions and blocks one by one, and together wherever they can."""

import pytest

from ptxrun import module, scheduler
from ptxrun.toys import batch_always


@pytest.fixture(params=["single", "batched"], autouse=True)
def order_of_execution(request, monkeypatch):
    if request.param == "single":
        monkeypatch.setattr(scheduler, "PLAN_LENGTH", 1 << 40)
        monkeypatch.setattr(module, "TOGETHER", 0)
    else:
        batch_always(monkeypatch)
