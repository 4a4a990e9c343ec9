"""The driver's way to Ray. It joins the Ray that is there, or starts one of its own.

Whoever reaches the ports of a Ray can run code in it, so one that the run starts asks for a token. Its processes leave
signals to the driver (`wire.signals`).
"""

import os
import secrets
from typing import Any

import ray
from ray._private.services import get_ray_address_from_environment
from ray._raylet import AuthenticationTokenLoader, Config

from bapo_openrlhf.training.wire.signals import blocked

MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"  # Ray's variables


def connect(address: str | None = None, **settings: Any) -> Any:
    """What `ray.init` returns. Without an address it joins the Ray of RAY_ADDRESS or of this machine, or starts one."""
    address = address or get_ray_address_from_environment(None, None) or "local"
    if address != "local":
        return ray.init(address=address, **settings)
    _ask_for_token()
    with blocked():
        return ray.init(address=address, **settings)


def token() -> dict[str, str]:
    """The variables with which another process of this user may join."""
    return {name: os.environ[name] for name in (MODE, TOKEN) if name in os.environ}


def _ask_for_token() -> None:
    """Let the Ray that this process starts ask for the user's token or a new one, unless the user decided that."""
    if os.environ.setdefault(MODE, "token") != "token":
        return
    loader = AuthenticationTokenLoader.instance()
    if not loader.has_token(ignore_auth_mode=True):
        # Ray would write a new one into the home folder, which others may read.
        os.environ[TOKEN] = secrets.token_hex(32)
        loader.reset_cache()
    Config.initialize("")  # because Ray has read the mode when it was imported
