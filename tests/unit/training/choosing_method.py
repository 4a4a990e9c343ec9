"""A method that draws twice as many prompts as it needs: BAPO on the first of them by name."""

from bapo_openrlhf.methods import BAPO


class First(BAPO):
    candidates = 2

    def choose_prompts(self, step, candidates, count):
        self.asked = [*getattr(self, "asked", []), (step, [prompt.text for prompt in candidates], count)]
        return sorted(range(len(candidates)), key=lambda position: candidates[position].text)[:count]
