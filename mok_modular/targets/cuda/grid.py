"""How many CTAs a kernel gets: all SMs, or beside the kernels of another stream a share of them."""

from __future__ import annotations

from typing import Literal

Share = Literal["all", "comm", "compute"]
"""`all`: no kernel of another stream runs beside it."""

MIN_SHARED_SMS = 3
"""With fewer, communication and products take turns on one stream: products need two SMs of their own."""


def is_shared(num_sms: int, num_comm_sms: int | None) -> bool:
    """Whether communication kernels run on a stream of their own. num_sms: those that are not reserved."""
    return num_comm_sms is not None and num_sms >= MIN_SHARED_SMS


def num_ctas(num_sms: int, num_comm_sms: int, ctas_per_sm: int, share: Share) -> int:
    """CTAs of a kernel with room for `ctas_per_sm` on each of `num_sms` SMs (those that are not reserved, at least 1).

    A communication kernel waits for signals of product kernels that were launched before it, but may be resident
    before they are. The hardware spreads its CTAs over as many SMs as there are CTAs, and a product CTA needs the
    shared memory of a whole SM. So a communication kernel gets at most half as many CTAs as there are SMs: with one on
    every SM, no product CTA could ever start. At least two SMs are left, since kernels whose CTAs have roles need one
    CTA of each.
    """
    if share == "all":
        return num_sms * ctas_per_sm
    num_comm_sms = min(num_comm_sms, num_sms // 2)
    if share == "comm":
        return min(num_comm_sms * ctas_per_sm, num_sms // 2)
    return (num_sms - num_comm_sms) * ctas_per_sm
