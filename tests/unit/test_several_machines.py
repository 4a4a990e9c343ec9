"""The examples for Slurm and Kubernetes, and the image, agree with what `check` and `plan` say and with the lock file.

Neither Slurm nor Kubernetes is here. The Slurm script is run with stand-ins that note how they were called, and the
other files are read.
"""

import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from bapo_openrlhf.cli import arguments, main
from bapo_openrlhf.flags.config import flags_of
from bapo_openrlhf.training.wire.signals import NUMBERS

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "examples" / "slurm" / "ba_ppo_qwen3_4b.sh"
RAY_JOB = ROOT / "examples" / "kubernetes" / "ba_ppo_qwen3_4b.yaml"
DOCKERFILE = ROOT / "examples" / "kubernetes" / "Dockerfile"
PAGE = (ROOT / "docs" / "several_machines.md").read_text()
LOCK = dict(
    line.split("==") for line in (ROOT / "requirements" / "cuda.lock.txt").read_text().splitlines() if "==" in line
)
MAKEFILE = (ROOT / "Makefile").read_text()
VENV = re.search(r"^VENV_GPU := (\S+)$", MAKEFILE, re.M)[1]
HOST = "10.1.2.3"
JOB = yaml.safe_load(RAY_JOB.read_text())
SPEC, CLUSTER = JOB["spec"], JOB["spec"]["rayClusterSpec"]
PODS = [CLUSTER["headGroupSpec"]["template"]["spec"]]  # of the head, and of each worker
for workers in CLUSTER["workerGroupSpecs"]:
    PODS += [workers["template"]["spec"]] * workers["replicas"]
*STARTS, FOLDER, PROGRAM, COMMAND = shlex.split(SPEC["entrypoint"])[:5]
FLAGS = shlex.split(SPEC["entrypoint"])[5:]


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    monkeypatch.chdir(ROOT)


def source(package, file):
    return (Path(find_spec(package).submodule_search_locations[0]) / file).read_text()


def assert_fills(words, machines, gpus, capsys):
    """By what `check` says, the run takes every GPU of these machines, and has as many engines as fit."""
    assert main.run(["check", "--prompts", "40000", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    facts = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in lines if "  " in line)
    for model in ("actor", "critic", "reference"):
        assert facts[model].endswith(f", {machines} node(s) x {gpus} GPU(s)"), facts[model]
    total = machines * gpus
    assert facts["GPUs"].startswith(f"{total} in total: {total} for actor + reference + critic + engines")
    engines, tensor_parallel = map(int, facts["rollout engines"].split(" x tensor parallel "))
    assert engines * tensor_parallel == total and gpus % tensor_parallel == 0  # no engine lies on two machines


PAIRS = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SLURM.read_text(), re.M)
DIRECTIVES = dict(PAIRS)
MACHINES, GPUS = int(DIRECTIVES["nodes"]), int(DIRECTIVES["gpus-per-node"])


@pytest.fixture
def submit(tmp_path):
    """submit(*flags, ...): run the script as a job; other keywords than `machines` and `gpus` are variables.

    Its result has the status, what was written to stderr, and the calls of programs. A call is (machine, words). The
    machine is "" outside of srun.
    """
    stubs, calls = tmp_path / "stubs", tmp_path / "calls"
    stubs.mkdir()
    note = '#!/bin/bash\nprintf "%s\\0" "${SLURM_NODEID-}" "${0##*/}" "$@" $\'\\1\' >> "$CALLS"\n'
    programs = {
        "bapo-openrlhf": (
            '[[ $1 == train ]] || exit 0\n[[ $SIGNALS ]] || exit "$STATUS"\n'
            "trap '((++n == SIGNALS)) && exit \"$STATUS\"' USR1\n"
            "while :; do kill -USR1 $PPID; /bin/sleep 0.3; done\n"
        ),
        "scontrol": "printf 'gpu01\\ngpu02\\n'\n",
        "getent": 'printf "%s STREAM gpu01\\n" $ADDRESSES\n',
        "srun": (
            'nodes="0 1"\nwhile [[ $1 == --* ]]; do [[ $1 != --overlap ]] || nodes=; shift; done\n'
            '[[ $nodes ]] || exec "$@"\nfor node in $nodes; do SLURM_NODEID=$node "$@" || exit; done\n'
        ),
        "ray": 'printf "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" > "$STUBS/token"\n'
        '[[ $1 != status ]] || echo " 0.0/$FOUND.0 GPU"\n',
        "sleep": "kill $PPID\n",  # instead of another round of the loop that waits
    }
    for name, text in programs.items():
        (stubs / name).write_text(note + text)
        (stubs / name).chmod(0o755)
    (tmp_path / VENV / "bin").mkdir(parents=True)
    (tmp_path / VENV / "bin" / "activate").write_text('PATH="$STUBS:$PATH"\n')

    def start(*flags, machines=MACHINES, gpus=GPUS, **more):
        path = f"{stubs}:/usr/bin:/bin" if "CONTAINER" in more else "/usr/bin:/bin"
        environment = {
            "PATH": path, "CONTAINER": "", "STUBS": str(stubs), "CALLS": str(calls), "STATUS": "0", "SIGNALS": "",
            "ADDRESSES": f"127.0.1.1 {HOST} 10.9.9.9", "FOUND": str(machines * gpus), "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "gpu[01-02]", "SLURM_JOB_NUM_NODES": str(machines), "SLURM_GPUS_ON_NODE": str(gpus),
        } | {name: str(value) for name, value in more.items()}  # fmt: skip
        words = ["bash", SLURM, *flags]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        calls_of = [call.split("\0")[:-1] for call in calls.read_text().split("\1\0")[:-1]]
        return SimpleNamespace(
            status=done.returncode, errors=done.stderr, calls=[(machine, words) for machine, *words in calls_of]
        )

    start.stubs = stubs
    return start


def training_flags(job):
    *_, words = [words for machine, words in job.calls if not machine and words[0] == "bapo-openrlhf"]
    assert words[1] == "train"
    return words[2:]


def test_the_slurm_script_starts_one_ray_over_what_slurm_gives(submit, capsys):
    assert len(PAIRS) == SLURM.read_text().count("#SBATCH")
    asked, job = DIRECTIVES, submit()
    assert job.status == 0, job.errors
    asks = ["scontrol", "show", "hostnames", "gpu[01-02]"], ["getent", "ahostsv4", "gpu01"]
    assert [words for _, words in job.calls[:2]] == [*asks]
    assert job.calls[2] == ("", ["bapo-openrlhf", "check", *training_flags(job)])
    # One task on each machine, which nothing but this job uses.
    (srun,) = [words for _, words in job.calls if words[0] == "srun"]
    assert asked["ntasks-per-node"] == "1" and "exclusive" in asked and srun[1:3] == ["--cpu-bind=none", "env"]
    blocked = srun[3].removeprefix("--block-signal=").split(",")
    assert {f"SIG{name}" for name in blocked} == {number.name for number in NUMBERS} and srun[4] == "bash"
    starts = {machine: words[2:] for machine, words in job.calls if words[:2] == ["ray", "start"]}
    gpus = ["--num-gpus", asked["gpus-per-node"]]
    assert starts["0"] == ["--block", "--head", "--node-ip-address", HOST, "--port", "6379", *gpus]
    assert starts["1"] == ["--block", "--address", f"{HOST}:6379", *gpus]
    assert ("1", ["ray", "health-check"]) in job.calls
    known = source("ray", "scripts/scripts.py")
    assert all(f'"{word}"' in known for words in starts.values() for word in words if word.startswith("--"))
    assert all(f'name="{command}"' in known or f"def {command}(" in known for command in ("health-check", "status"))
    assert_fills(training_flags(job), MACHINES, GPUS, capsys)


def test_the_slurm_script_follows_another_number_of_machines_and_other_flags(submit, capsys):
    job = submit("--run.name", "four machines", machines=4, gpus=2)
    assert training_flags(job)[-2:] == ["--run.name", "four machines"]
    assert all(words[-2:] == ["--num-gpus", "2"] for _, words in job.calls if words[:2] == ["ray", "start"])
    assert_fills(training_flags(job), 4, 2, capsys)


def test_the_slurm_script_runs_all_of_it_in_an_image(submit, tmp_path):
    """As pyxis takes it: an option of srun names the image, and the training is a step on the first machine."""
    shutil.rmtree(tmp_path / VENV)  # which the image has, and not the machine
    job = submit(CONTAINER="/images/bapo.sqsh", STATUS=3)
    steps = [words for machine, words in job.calls if words[0] == "srun"]
    inside = ["--container-image=/images/bapo.sqsh", f"--container-mounts={tmp_path}:{tmp_path},/tmp:/tmp",
              f"--container-workdir={tmp_path}"]  # fmt: skip
    commands = [next(word for word in words[1:] if not word.startswith("--")) for words in steps]
    assert sorted(commands) == ["bapo-openrlhf", "bapo-openrlhf", "bash", "env"] and job.status == 3
    for words, command in zip(steps, commands, strict=True):
        assert all(word in words for word in inside)
        assert ("--nodelist=gpu01" in words and "--overlap" in words) == (command != "env")


@pytest.mark.parametrize(("status", "again"), [(0, False), (3, False), (75, True)])
def test_the_job_has_the_status_of_the_training_and_is_queued_again_if_that_may_go_on(submit, status, again):
    job = submit(STATUS=status)
    assert job.status == status and (("", ["scontrol", "requeue", "4711"]) in job.calls) == again


def test_the_script_passes_slurms_signal_on_and_waits_for_the_training(submit):
    assert DIRECTIVES["signal"] == f"B:{signal.SIGUSR1.name.removeprefix('SIG')}@600" and "requeue" in DIRECTIVES
    job = submit(STATUS=128 + signal.SIGUSR1, SIGNALS=2)
    assert job.status == 128 + signal.SIGUSR1 and ("", ["scontrol", "requeue", "4711"]) in job.calls


def test_the_job_fails_if_a_machine_is_missing(submit):
    job = submit(FOUND=(MACHINES - 1) * GPUS)
    assert job.status == 1 and f"error: Ray has not found {MACHINES * GPUS} GPUs" in job.errors
    assert not [words for _, words in job.calls if "train" in words]


def test_the_job_fails_if_the_machine_has_only_a_loopback_address(submit):
    job = submit(ADDRESSES="127.0.1.1 127.0.0.1")
    assert job.status != 0 and "gpu01 has no address that other machines reach" in job.errors
    assert [words[0] for _, words in job.calls] == ["scontrol", "getent"]


def test_the_ray_job_takes_every_gpu_of_its_pods_and_continues_if_it_is_started_again(capsys):
    assert (JOB["apiVersion"], JOB["kind"]) == ("ray.io/v1", "RayJob")
    assert (STARTS, PROGRAM, COMMAND) == (["env", "-C"], "bapo-openrlhf", "train")
    assert all(one["minReplicas"] == one["replicas"] == one["maxReplicas"] for one in CLUSTER["workerGroupSpecs"])
    limits = [pod["containers"][0]["resources"]["limits"] for pod in PODS]
    (gpus,) = {limit["nvidia.com/gpu"] for limit in limits}  # the head is a machine like the others
    assert all(limit["cpu"] > gpus for limit in limits)  # Ray takes one for each GPU
    assert_fills(FLAGS, len(PODS), gpus, capsys)
    assert SPEC["backoffLimit"] > 0 and SPEC["shutdownAfterJobFinishes"] is True
    assert arguments.parse(FLAGS).ckpt.load_enable
    # The pod that submits the job is another one.
    assert CLUSTER["headGroupSpec"]["rayStartParams"] == {"dashboard-host": "0.0.0.0"}


PLACES = {"run.dir", "logger.tensorboard_dir", "data.prompt_dataset", "ckpt.path", "ckpt.output_dir"}


def test_what_the_pods_of_the_ray_job_share():
    given = flags_of(arguments.parse(FLAGS))
    written = [given[name] for name in PLACES]
    for pod in PODS:
        (container,) = pod["containers"]
        (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
        assert mount["name"] == volume["name"] and f"`{volume['persistentVolumeClaim']['claimName']}`" in PAGE
        cache = {variable["name"]: variable["value"] for variable in container["env"]}["HF_HOME"]
        assert all(Path(path).is_relative_to(mount["mountPath"]) for path in [*written, cache]), written
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]  # NCCL locks memory
        (secret,) = [source["secretRef"] for source in container["envFrom"]]
        assert secret["optional"] is True and f"`{secret['name']}`" in PAGE
        assert pod["enableServiceLinks"] is False  # a service named vllm would set VLLM_PORT


def test_ray_asks_for_a_token_in_both_examples(submit):
    assert CLUSTER["authOptions"] == {"mode": "token"}
    tokens = set()
    for _ in range(2):
        submit()
        tokens.add((submit.stubs / "token").read_text())
    assert all(re.fullmatch("token [0-9a-f]{64}", token) for token in tokens) and len(tokens) == 2


def test_both_examples_run_the_same_preset_on_the_same_machines(submit):
    slurm, kubernetes = (flags_of(arguments.parse(flags)) for flags in (training_flags(submit()), FLAGS))
    assert {name for name in slurm if slurm[name] != kubernetes[name]} == PLACES


def words_of(instruction):
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.M).replace("\\\n", " ")
    return [words for name, *words in map(str.split, filter(str.strip, text.splitlines())) if name == instruction]


def test_the_image_has_the_versions_of_the_lock():
    ((image, *_),) = words_of("FROM")
    name, version, kind = re.fullmatch(r"([\w/]+):([\d.]+)-(\w+)-ubuntu[\d.]+", image).groups()
    assert (name, kind) == ("nvidia/cuda", "devel")  # with nvcc
    assert LOCK["cuda-toolkit"].startswith(f"{version}.")
    assert LOCK["nvidia-cuda-runtime"].startswith(version.rpartition(".")[0] + ".")
    (python,) = re.findall(r"--python-version ([\d.]+)", (ROOT / "tools" / "lock.sh").read_text())
    lines = [" ".join(words) for words in words_of("RUN")]
    assert f"pip install uv && uv python install {python}" in lines
    assert f'make install-gpu PYTHON="$(uv python find {python})"' in lines
    assert CLUSTER["rayVersion"] == LOCK["ray"]


def test_the_image_has_all_that_its_installation_reads(tmp_path):
    for *sources, target in words_of("COPY"):
        for source in sources:
            if (ROOT / source).is_dir():
                assert target == source
                shutil.copytree(ROOT / source, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, tmp_path / target)
    code = "from setuptools import build_meta; print(build_meta.build_editable('.'))"
    for words, says in (
        (["make", "-n", "install-gpu"], "--constraint requirements/cuda.lock.txt"),
        ([sys.executable, "-c", code], ".whl\n"),
    ):
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and says in done.stdout, done.stderr
    assert (tmp_path / tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["readme"]).is_file()
    assert (tmp_path / FLAGS[FLAGS.index("--config") + 1]).is_file()


def test_the_image_is_what_the_ray_job_and_the_page_name():
    assert words_of("WORKDIR") == [[FOLDER]]
    assert f"PATH={FOLDER}/{VENV}/bin:$PATH" in [word for words in words_of("ENV") for word in words]
    (image,) = {pod["containers"][0]["image"] for pod in PODS}
    command = f"docker build --file {DOCKERFILE.relative_to(ROOT)} --tag {image} ."
    assert command in PAGE and f"# {command}\n" in DOCKERFILE.read_text()


def test_the_page_names_the_numbers_of_the_examples(capsys):
    command = re.search(r"^bapo-openrlhf plan (.*)$", PAGE, re.M)[1].split()
    assert command[-2:] == ["--gpus", str(MACHINES * GPUS)]
    assert main.run(["plan", *command]) == 0
    assert f"with BA-PPO fits on {MACHINES * GPUS} H100 GPUs" in capsys.readouterr().out
    commands = re.findall(r"^bapo-openrlhf (?:check|train) ((?:.*\\\n)*.*)$", PAGE, re.M)
    assert len(commands) == 2
    for words in commands:
        assert_fills(words.replace("\\\n", " ").split(), MACHINES, GPUS, capsys)


def test_the_page_names_the_ports_of_ray():
    constants, flags = source("ray", "_private/ray_constants.py"), source("ray", "scripts/scripts.py")
    ports = [re.search(rf"^DEFAULT_{name} = (\d+)$", constants, re.M)[1] for name in ("PORT", "DASHBOARD_PORT")]
    ports += [re.search(rf'"--{end}-worker-port",[^)]*?default=(\d+)', flags)[1] for end in ("min", "max")]
    section = PAGE.split("## The network")[1].split("\n## ")[0]
    assert re.findall(r"\b\d{4,5}\b", section) == ports


def test_the_page_names_the_variables_that_openrlhf_hands_on():
    handed = re.findall(r'"(\w+)": os\.environ\.get', source("openrlhf", "cli/train_ppo_ray.py"))
    named = re.search(r"OpenRLHF hands on only (.*?)\.", " ".join(PAGE.split()))[1]
    assert set(re.findall(r"`(\w+)`", named)) == set(handed) and len(handed) == 3
