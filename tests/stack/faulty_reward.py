"""reward.py, but of the prompts 1+1=, 2+2= ... the verifier fails: hangs, raises, dies, allocates, gives nan."""

import dataclasses
import os
import signal
import time

import reward


@dataclasses.dataclass
class Verdict:
    """It can be made only if the module is in sys.modules, because its annotations are evaluated later."""

    rewards: dict
    kind: dataclasses.KW_ONLY


def reward_func(queries, prompts, labels, **kwargs):
    if queries[0] != prompts[0]:  # the check before the run calls with an empty response
        match prompts[0]:
            case "1+1=":
                time.sleep(10**6)
            case "2+2=":
                raise KeyError("no such answer")
            case "3+3=":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "4+4=":
                bytearray(2**32)
            case "5+5=":
                return {"rewards": [float("nan")]}
    return Verdict(reward.reward_func(queries, prompts, labels, **kwargs)).rewards
