"""In a process with this folder in its path, Ray and vLLM cannot be found, as if nobody had installed them."""

import sys
from importlib.machinery import PathFinder


class _Hides:
    find_distributions = PathFinder.find_distributions

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in {"ray", "vllm"} else PathFinder.find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = _Hides
