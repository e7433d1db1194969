"""CTAs of kernels that run beside each other on a GPU: products must always find room."""

from __future__ import annotations

import pytest

from mok_modular.targets.cuda.grid import is_shared, num_ctas


@pytest.mark.parametrize("num_sms", [1, 2, 3, 4, 7, 92, 132, 148])
@pytest.mark.parametrize("num_comm_sms", [1, 2, 5, 16, 33, 66, 131, 1000])
@pytest.mark.parametrize("ctas_per_sm", [1, 3, 12])
def test_two_sms_are_left_for_products(num_sms: int, num_comm_sms: int, ctas_per_sm: int) -> None:
    if not is_shared(num_sms, num_comm_sms):
        assert num_sms < 3
        return
    num_comm = num_ctas(num_sms, num_comm_sms, ctas_per_sm, "comm")
    assert num_comm >= 1
    assert num_sms - min(num_comm, num_sms) >= 2  # the hardware puts every CTA on an SM of its own while there are such
    assert num_ctas(num_sms, num_comm_sms, 1, "compute") >= 2


def test_shares() -> None:
    assert num_ctas(132, 16, 3, "comm") == 48
    assert num_ctas(132, 16, 1, "compute") == 116
    assert num_ctas(132, 1000, 1, "compute") == 66
    assert num_ctas(132, 0, 3, "all") == 396
    assert not is_shared(132, None)
