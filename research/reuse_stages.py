"""The stages of reuse_design.md, in the order in which they are run. decision_stages.py says how.

Their learning rates are those that the searches of fair_stages.py have found for the arms that they are compared with.
Seconds are those of the nearest arms there; with a re-evaluation in each step, part 1 generates up to half as many
responses more, which is taken as a third more time. Part 2 has only the run that comes before its comparison, because
the gate ended none of its steps.
"""

from __future__ import annotations

from fair_stages import PRICE, SHAPE
from stage import Stage

WIDE = 4 / 3 * SHAPE["wide"]

REUSE = (
    Stage("prefixes", "1", "reuse_prefixes", tuple(range(611, 623)), {"wide": WIDE, "prefixes": WIDE},
          rates_from="shape_rates", rates_of={"prefixes": "wide"}, trial="reuse", paired=False, parallel=2),
    Stage("gate", "2", "reuse_gate", (901,), {"gated": PRICE["four_epochs"]}, rates_from="price_rates",
          rates_of={"gated": "four_epochs"}, trial="reuse", paired=False),
)  # fmt: skip
