"""A trainer that kills a process of its own run: FAULT is VICTIM/STEP/PHASE/SECONDS (see probe.py).

VICTIM may be followed by :SIGNAL, as in driver:SIGTERM, which it then gets in the place of a SIGKILL, once.

VICTIM, one of driver, trainer, engine, core (vLLM's own process, a child of the engine), actor, critic, reference and
node (FAULT_NODE is the process of its raylet), gets a SIGKILL that many seconds after the phase has begun whose name
starts with PHASE. Training may take less than that, so a worker that has to die in a phase is stopped (SIGSTOP) where
the phase begins. A model's worker that saves is not stopped, because it has to die while it writes.
"""

import json
import os
import signal
import threading
import time

import psutil
import ray
from rotary_workers import models_of, noted

from bapo_openrlhf.training.trainer import trainer
from bapo_openrlhf.training.trainer.run_state import RunState


def node_of(actor):
    return ray.get(actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id()))


def process_id(actor):
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


def frequencies_of(worker):
    """By role and name: the dtype and the values."""
    return {
        role: {name: [str(value.dtype), value.tolist()] for name, value in noted(part).items() if "inv_freq" in name}
        for role, part in models_of(worker).items()
    }


WORKERS = ("engine", "core", "actor", "critic", "reference")


class FaultyState(RunState):
    """A state that strikes when a phase begins."""

    _phase = "starting"
    struck = None  # the phase in which a signal other than SIGKILL was sent

    @property
    def phase(self):
        return self._phase

    @phase.setter
    def phase(self, name):
        self._phase = name
        victim, step, phase, seconds = os.environ["FAULT"].split("/")
        if name.startswith(phase) and self.step == int(step) and self.struck is None:
            if ":" in victim:
                self.struck = name
            if victim == "core" or (victim in WORKERS and not phase.startswith("saving")):
                os.kill(self.victims[victim], signal.SIGSTOP)
            threading.Thread(target=self.strike, args=(victim, float(seconds)), daemon=True).start()
            if float(seconds) == 0:
                time.sleep(3 if ":" in victim else 1)  # let it be dead, or the trainer told, before the phase begins

    def strike(self, victim, seconds):
        time.sleep(seconds)
        victim, _, number = victim.partition(":")
        os.kill(self.victims[victim], getattr(signal, number or "SIGKILL"))


class FaultyTrainer(trainer.AdaptedPPOTrainer):
    """The trainer, with a fault in it."""

    def fit(self, global_step=0):
        self.victims = {
            "driver": int(os.environ.get("FAULT_DRIVER", 0)),  # a Ray that is not the run's own does not tell it
            "trainer": os.getpid(),
            "engine": process_id(self.vllm_engines[-1]),
        }
        relatives = psutil.Process(self.victims["engine"]).parent().children(recursive=True)
        self.victims["core"] = next(process.pid for process in relatives if "EngineCore" in process.cmdline()[0])
        groups = {name: getattr(self, f"{name}_model_group") for name in ("actor", "critic", "reference")}
        self.victims |= {name: process_id(group._actor_handlers[-1]) for name, group in groups.items() if group}
        calls = [group._actor_handlers[-1].__ray_call__.remote(frequencies_of) for group in groups.values() if group]
        print("frequencies:", json.dumps(ray.get(calls)), flush=True)
        if "FAULT_NODE" in os.environ:
            self.victims["node"] = int(os.environ["FAULT_NODE"])
            actors = {"engine": self.vllm_engines, "actor": self.actor_model_group._actor_handlers}
            nodes = {name: list(map(node_of, processes)) for name, processes in actors.items()}
            print("nodes:", json.dumps(nodes), flush=True)
        self.state.__class__, self.state.victims = FaultyState, self.victims  # the parts have this state too
        return super().fit(global_step)


FaultyTrainerActor = ray.remote(FaultyTrainer)
