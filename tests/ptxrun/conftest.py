"""Every test of ptxrun runs twice: one instruction at a time, and in batches wherever that is possible."""

import pytest

from ptxrun import scheduler
from ptxrun.toys import batch_always


@pytest.fixture(params=["single", "batched"], autouse=True)
def order_of_execution(request, monkeypatch):
    if request.param == "single":
        monkeypatch.setattr(scheduler, "PLAN_LENGTH", 1 << 40)
    else:
        batch_always(monkeypatch)
