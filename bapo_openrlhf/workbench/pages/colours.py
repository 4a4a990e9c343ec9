"""Labels and colours of everything that pages show: sources, group states, phases, runs.

The colours are those of Okabe and Ito, which can be told apart with any colour vision. A chart names a colour as a CSS
variable, for example var(--fresh). The page defines the variables for the light and the dark theme.
"""

import re

LIGHT = {
    "palette-0": "#0072B2", "palette-1": "#D55E00", "palette-2": "#009E73", "palette-3": "#CC79A7",
    "palette-4": "#E69F00", "palette-5": "#56B4E9", "palette-6": "#6B6B6B",
    "fresh": "#0072B2", "reevaluated": "#E69F00", "replayed": "#56B4E9", "prefixed": "#CC79A7",
    "cell": "#0072B2", "on-cell": "#FFFFFF",
    "paper": "#FFFFFF", "card": "#FFFFFF", "ink": "#1A1D21", "muted": "#565D66", "grid": "#E1E4E8", "line": "#D0D5DB",
    "link": "#005A8F", "mark": "#FFF4D6", "good": "#00664A", "bad": "#A33F00",
}  # fmt: skip
DARK = {
    "palette-0": "#4AA3DF", "palette-1": "#F07F2E", "palette-5": "#8CCEF2", "palette-6": "#A8A8A8",
    "fresh": "#2E8CCB", "replayed": "#8CCEF2",
    "paper": "#14171A", "card": "#1B1F24", "ink": "#E9ECEF", "muted": "#A9B1BA", "grid": "#31373E", "line": "#3A414A",
    "link": "#7CC4F4", "mark": "#3A3117", "good": "#5FD1AC", "bad": "#FF9A5C",
}  # fmt: skip

INK, MUTED, GRID = "var(--ink)", "var(--muted)", "var(--grid)"
PALETTE = tuple(f"var(--palette-{place})" for place in range(7))
DASHES = ("", "7 3", "2 2", "7 2 2 2")
NONE_RIGHT, ALL_RIGHT = "#D55E00", "#009E73"  # an orange and a green that can be told apart with any colour vision

SOURCE_LABELS = {
    "fresh": "fresh (X1)",
    "reevaluated": "re-evaluated (X2)",
    "replayed": "replayed (X3)",
    "prefixed": "with a prefix",
}
SOURCE_COLOURS = {source: f"var(--{source})" for source in SOURCE_LABELS}

# What can become of a generated group. The order is that of the tables.
STATE_LABELS = {
    "fresh": "trained on: fresh (X1)",
    "reevaluated": "trained on: re-evaluated (X2)",
    "prefixed": "trained on: with a prefix",
    "none_right": "filtered: no response was right",
    "all_right": "filtered: every response was right",
    "by_draw": "filtered: by the filter's draw",
    "filtered": "filtered: reason not recorded",
    "unimproved": "re-evaluated, still too hard",
    "solved": "re-evaluated, nothing left to learn from",
    "unsteered": "with a prefix, and without a signal",
    "demonstration": "not solved: its worked solution is trained on",
    "cut": "selected, but there was no room",
    "too_far": "selected, but too far from today's policy",
    "nonfinite": "selected, but log-probs were no finite numbers",
    "failed": "failed: no reward, or no finite log-probs",
}
REASON_COLOURS = {"none_right": NONE_RIGHT, "all_right": ALL_RIGHT, "by_draw": PALETTE[3]}

# The phases of a step, in their order. Other phases are shown under the names that they have.
PHASE_LABELS = {
    "generation": "generation",
    "reevaluation": "re-evaluation on its own",
    "make_experience": "log-probs, values, rewards",
    "adapt": "batch adaptation",
    "ppo_train": "training",
    "broadcast": "sync of the rollout engines",
}


def accuracy_colours(size: int) -> list[str]:
    """Colours of the bins 0..G: none right in orange, all right in green, and blues from light to dark between them."""
    parts = ((0xCF, 0x00), (0xE6, 0x5A), (0xF5, 0x8F))  # red, green and blue: of the lightest, and of the darkest
    shares = [k / max(size - 2, 1) for k in range(size - 1)]
    blues = ["#" + "".join(f"{round(low + share * (high - low)):02X}" for low, high in parts) for share in shares]
    return [NONE_RIGHT, *blues, ALL_RIGHT]


def css() -> str:
    """The definitions of the colour variables, light and dark."""
    light, dark = ("".join(f" --{name}: {colour};" for name, colour in theme.items()) for theme in (LIGHT, DARK))
    in_the_dark = f"@media (prefers-color-scheme: dark) {{ :root {{{dark} }} }}"
    return f":root {{ color-scheme: light dark;{light} }}\n{in_the_dark}\n"


def without_variables(text: str) -> str:
    """`text` with the light theme's colours in place of the variables, because a PNG file has no style sheet."""
    return re.sub(r"var\(--([\w-]+)\)", lambda match: LIGHT[match[1]], text)
