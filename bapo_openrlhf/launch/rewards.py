"""One call of the reward function, and one question to each reward server, as the rollout engines ask later."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf import user_file
from bapo_openrlhf.errors import ConfigError, not_checked, one_line
from bapo_openrlhf.launch.apart import Begins, Trial
from bapo_openrlhf.training.engine.reward_worker import Invalid, call, checked, limit_memory, names_responses

FLAG, AGENT = "reward.remote_url", "train.agent_func_path"
SECONDS = 30.0  # that a server has for its answer
NOT_READY = (502, 503, 504)  # statuses of HTTP with which a server or what is before it asks to come again


def check_reward(args: SimpleNamespace, problem: tuple[str, Any] | None, not_found: Sequence[str]) -> list[str]:
    """Check that the reward function, the agent or the server exists, and call it once if a row is given.

    Function and server must give one finite reward for an empty response, the agent must play an episode. Returns a
    warning for each that could not be called, and `not_found` if the function can only find responses by their prompts.
    """
    endpoints, agent = args.reward.remote_url or [], args.train.agent_func_path
    if agent:
        if not agent.endswith(".py") or not user_file.is_file(AGENT, user_file.at_home(agent)):
            raise ConfigError(f"{AGENT} is {agent}; it must be a .py file that is there")
        try:
            from bapo_openrlhf.launch.episode import check_agent  # it imports torch and a part of OpenRLHF
        except ModuleNotFoundError as error:
            return [not_checked(f"{AGENT} is {agent}", error)]
        return check_agent(args, problem)
    if not endpoints or not endpoints[0].endswith(".py"):
        warnings = check_reward_servers(endpoints, problem, send_responses=args.verifier.send_responses)
        return warnings if args.verifier.send_responses or not endpoints else [*warnings, *not_found]
    if len(endpoints) > 1:
        raise ConfigError(f"{FLAG} is {','.join(endpoints)}; it must be one .py file, or only addresses")
    seconds = args.verifier.timeout if args.verifier.processes else None  # otherwise a call of the run has no limit
    how = "called with an empty response to the first prompt"
    trial = Trial(FLAG, str(user_file.at_home(endpoints[0])), "reward_func", how, seconds)
    return trial.run(lambda begins: _call(trial, problem, args.verifier, begins, not_found))


def _call(
    trial: Trial, problem: tuple[str, Any] | None, verifier: Any, begins: Begins, not_found: Sequence[str]
) -> list[str]:
    function = getattr(user_file.load(FLAG, Path(trial.file)), "reward_func", None)
    if not callable(function):
        raise ConfigError(f"{FLAG} {trial.file} defines no function reward_func(queries, prompts, labels)")
    if problem is None:
        return []
    prompt, label = problem
    begins(place := user_file.definition(function))
    try:
        if verifier.processes:
            limit_memory(int(verifier.memory_gib * 2**30))
        checked(call(function, [prompt], [prompt], [label], [""]))
    except Invalid as error:
        raise trial.error(str(error), place) from None
    except MemoryError:
        most = f"more than {verifier.memory_gib:g} GiB beyond the loaded file (verifier.memory_gib)"
        raise trial.error(f"ran out of memory: {most}", place) from None
    except (Exception, SystemExit) as error:
        frames = [*walk_tb(error.__traceback__)][2:]  # after the lines of this function and of `call`
        how = "" if frames else "; it must take the arguments queries, prompts, labels"
        raise trial.error(f"raised {one_line(error)}{how}", user_file.place(error, function)) from error
    return [] if names_responses(function) else [*not_found]


def check_reward_servers(
    endpoints: Sequence[str], problem: tuple[str, Any] | None, *, send_responses: bool
) -> list[str]:
    """Check the addresses, and ask each server for the reward of an empty response if there is a problem.

    A server that does not answer is a warning: it may be started later, or be reached only from elsewhere.
    """
    commas = "; there is a comma between two addresses, and none in a name" if len(endpoints) > 1 else ""
    for endpoint in endpoints:
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"{FLAG} is {endpoint}; it must be a .py file with reward_func, or addresses that begin with http:// "
                f"or https://{commas}"
            )
    if problem is None:
        return []
    prompt, label = problem
    request = (prompt, prompt, label, "" if send_responses else None)
    return [warning for endpoint in dict.fromkeys(endpoints) if (warning := _ask(endpoint, request))]


def _ask(endpoint: str, request: tuple[Any, ...]) -> str:
    import aiohttp

    from bapo_openrlhf.training.engine.reward_server import answer_of, request_of  # it imports aiohttp

    question = f"{FLAG} is {endpoint}; asked for the reward of an empty response to the first prompt"
    try:
        checked(asyncio.run(answer_of(endpoint, request_of(*request), SECONDS)))
    except (aiohttp.ClientResponseError, aiohttp.ClientConnectionError, TimeoutError) as error:
        if isinstance(error, aiohttp.ClientResponseError) and error.status not in NOT_READY:
            raise ConfigError(f"{question}, it answered {error.status} {error.message}") from None
        return f"{FLAG} is {endpoint}; it does not answer now ({one_line(error)}), and the first step needs it"
    except Invalid as error:
        raise ConfigError(f"{question}, it {error}") from None
    except (aiohttp.ClientError, ValueError, TypeError) as error:  # such as an answer or a label that is no JSON
        raise ConfigError(f"{question}: {one_line(error)}") from None
    return ""
