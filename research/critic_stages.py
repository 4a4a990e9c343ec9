"""The stages of critic_design.md, in the order in which they are run. decision_stages.py says how.

Seconds are estimates for an AMD EPYC with AVX-512 and bf16, without AMX, of a run beside another one: twice as many
steps as in part 1 of fair_trial_design.md, and a critic.
"""

from __future__ import annotations

from stage import Stage

SEARCHED = "generated"  # the method whose critic's rate is searched, and taken by all
CLIMB = (("setting",), ("partial",), ("pretrained",))
ARMS = {"ppo": 650.0, "today": 600.0, "control": 650.0, "generated": 700.0, "grouped": 700.0, "group_relative": 450.0}

CRITIC = (
    Stage("critic_setting", "1", "critic_setting", (501, 502), {method: 650.0 for step in CLIMB for method in step},
          climb=CLIMB, trial="critic", paired=False, parallel=2),
    Stage("critic_rates", "2", "critic_groups", (503, 504, 505), {SEARCHED: ARMS[SEARCHED]},
          grid=(4e-4, 1e-3, 2e-3), settings_from="critic_setting", trial="critic", rate="critic.adam.lr",
          paired=False, parallel=2, by_mean=True),
    Stage("critic_arms", "3", "critic_groups", tuple(range(511, 523)), ARMS, rates_from="critic_rates",
          rates_of=dict.fromkeys(ARMS, SEARCHED), settings_from="critic_setting", trial="critic", rate="critic.adam.lr",
          paired=False, parallel=2),
)  # fmt: skip
