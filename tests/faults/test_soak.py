"""The soak, short: the long one is ``python -m tests.faults.soak --minutes 30``."""

from __future__ import annotations

from tests.faults.soak import CHAIN, Soak


async def test_everything_is_accounted_for() -> None:
    findings = await Soak(CHAIN, duration_s=12.0, seed=1, life_steps=600).run()
    assert findings["ok"], findings
    assert findings["lives"] > 2
    assert {"finished", "refused", "failed", "left"} <= findings.keys()
