"""The stages of fair_trial_design.md, in the order in which they are run. decision_stages.py says how.

Seconds are estimates for an AMD EPYC with AVX-512 and bf16, without AMX, of a run beside another one if the stage runs
two at a time. They are 1.6 times those of the nearest kept runs, which a machine with AMX made. If those had a machine
for themselves, the steps take 1/0.86 times as long.
"""

from __future__ import annotations

from stage import Stage

TIMED_STEPS = 20  # of a run that measures unit times
RECIPE = {"plain": 300.0, "recipe": 265.0, "filter_only": 250.0, "bapo": 270.0}
UNITS = {"plain": 90.0, "recipe": 90.0, "filter_only": 90.0, "bapo": 90.0}
SHAPE = {"filter_only": 600.0, "wide": 750.0, "matched": 700.0}  # those of the comparisons
OTHERS = {"plain": 700.0, "bapo": 750.0}
PRICE = {"four_epochs": 400.0, "two_epochs": 280.0, "filtered": 400.0, "replay_8": 400.0, "replay_16": 380.0}
SMOLLM2 = {"plain": 2400.0, "recipe": 2100.0}

FAIR = (
    Stage("recipe", "1", "fair_recipe", tuple(range(401, 417)), RECIPE, trial="fair", paired=False, parallel=2),
    Stage("recipe_units", "1", "fair_recipe", (471, 472, 473), UNITS, trial="fair", paired=False,
          flags={"data.max_samples": 8 * TIMED_STEPS, "eval.steps": -1}),
    Stage("shape_rates", "2", "fair_shape", (417, 418, 419), SHAPE, grid=(2e-5, 5e-5, 1e-4), trial="fair", paired=False,
          parallel=2, by_mean=True, matched={"matched": ("wide", "filter_only")}),
    Stage("shape", "2", "fair_shape", tuple(range(421, 435)), SHAPE, rates_from="shape_rates", trial="fair",
          paired=False, parallel=2, matched={"matched": ("wide", "filter_only")}),
    Stage("price_rates", "3", "fair_price", (435, 436, 437), PRICE, grid=(2e-5, 1e-4), trial="fair", paired=False,
          parallel=2, by_mean=True, share=0.95),
    Stage("price", "3", "fair_price", (*range(441, 455), *range(475, 489)), PRICE, rates_from="price_rates",
          trial="fair", paired=False, parallel=2, best_of=("replay_8", "replay_16")),
    Stage("others_rates", "2", "fair_shape", (417, 418, 419), OTHERS, grid=(2e-5, 5e-5, 1e-4), trial="fair",
          paired=False, parallel=2, by_mean=True, place="shape_rates"),
    Stage("others", "2", "fair_shape", tuple(range(421, 435)), OTHERS, rates_from="others_rates", trial="fair",
          paired=False, parallel=2, beside="shape", place="shape"),
    Stage("smollm2", "4", "fair_smollm2", (461, 462, 463, 464), SMOLLM2, trial="fair", paired=False),
)  # fmt: skip
