"""What a command starts, and how many ranks a worker has by it."""

from __future__ import annotations

from typing import Any

import pytest

from pacekeeper_operator.convert.commands import LaunchKind, drop_topology_options, find_variables, read_command
from pacekeeper_operator.convert.draft import ConversionRefused, Draft
from pacekeeper_operator.convert.ranks import RanksField, set_ranks_per_worker


def build_container(*command: str, gpus: int | str = 0, cpu: str = "", **variables: str) -> dict[str, Any]:
    limits = {**({"nvidia.com/gpu": gpus} if gpus else {}), **({"cpu": cpu} if cpu else {})}
    env = [{"name": name, "value": value} for name, value in variables.items()]
    return {"name": "c", "command": list(command), "env": env, "resources": {"limits": limits}}


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        (["torchrun", "train.py"], LaunchKind.TORCHRUN),
        (["/opt/conda/bin/torchrun", "train.py"], LaunchKind.TORCHRUN),
        (["python3", "-u", "-m", "torch.distributed.run", "train.py"], LaunchKind.TORCHRUN),
        (["numactl", "--interleave=all", "torchrun", "train.py"], LaunchKind.TORCHRUN),
        (["bash", "-euo", "pipefail", "-c", "cd /app\nexec torchrun train.py"], LaunchKind.TORCHRUN),
        (["sh", "-c", "pip install deepspeed && torchrun train.py --deepspeed ds.json"], LaunchKind.TORCHRUN),
        (["bash", "-c", "# deepspeed train.py\ntorchrun train.py"], LaunchKind.TORCHRUN),
        (["python", "/opt/conda/bin/torchrun", "train.py"], LaunchKind.TORCHRUN),
        (["python", "-W", "ignore", "-um", "torch.distributed.run", "train.py"], LaunchKind.TORCHRUN),
        (["nsys", "profile", "python", "-m", "torch.distributed.run", "train.py"], LaunchKind.TORCHRUN),
        (["bash", "-c", "until torchrun train.py; do sleep 5; done; python export.py"], LaunchKind.TORCHRUN),
        (["bash", "-c", "torchrun train.py --fast || torchrun train.py"], LaunchKind.TORCHRUN),
        (["python", "train.py", "--launcher", "torchrun"], LaunchKind.PYTHON),
        (["python", "train.py", "-m", "torch.distributed.run"], LaunchKind.PYTHON),
        (["bash", "train.sh", "-c", "deepspeed.json"], LaunchKind.UNKNOWN),
        (["bash", "-c", "pip install torchrun; ./train"], LaunchKind.UNKNOWN),
        (["accelerate", "launch", "train.py"], LaunchKind.ACCELERATE),
        (["python", "-m", "accelerate.commands.accelerate_cli", "launch", "train.py"], LaunchKind.ACCELERATE),
        (["python", "-m", "accelerate.commands.launch", "train.py"], LaunchKind.ACCELERATE),
        (["python", "-m", "torch.distributed.launch", "train.py"], LaunchKind.TORCHRUN),
        (["python3.12", "train.py"], LaunchKind.PYTHON),
        (["python", "-O", "-Wignore", "train.py"], LaunchKind.PYTHON),
        (["bash", "-c", "python -m pip install x; ./train"], LaunchKind.UNKNOWN),
        (["python", "-u", "-m", "package.train"], LaunchKind.PYTHON),
        (["bash", "train.sh"], LaunchKind.UNKNOWN),
        (["bash", "-c", "echo 'a quote that does not end"], LaunchKind.UNKNOWN),
        ([], LaunchKind.UNKNOWN),
    ],
)
def test_the_launcher_is_found(command: list[str], launcher: LaunchKind) -> None:
    found = read_command(build_container(*command))
    assert (found.launcher, found.refusal) == (launcher, "")


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (["bash", "-c", "pip list; python train.py --lr 1"], "train.py"),
        (["/bin/bash", "-lc", "cd /app && exec python3 -u src/train.py | tee log"], "src/train.py"),
        (["sh", "-c", "MODE=fast numactl -N 0 python -W ignore ./train.py 2>&1"], "./train.py"),
        (["sh", "-c", 'python "$HOME/train.py"'], "train.py"),
        (["sh", "-c", "SCRIPT=/app/fit.py\npython $SCRIPT"], "fit.py"),
        (["sh", "-c", "python ${SCRIPT:-/app/train.py}"], "train.py"),
        (["sh", "-c", "python -Om package.module -x"], "package.module"),
        (["sh", "-c", "python -m pip install x; python -c 'import x'; python train.py"], "train.py"),
        (["sh", "-c", "while ! nc -z a 1; do sleep 1; done; tensorboard & python train.py"], "train.py"),
        (["sh", "-c", "export RANK=$JOB_COMPLETION_INDEX; python train.py --nodes $WORLD_SIZE"], "train.py"),
        (["sh", "-c", "export PYTHONPATH=/app:$PYTHONPATH; python train.py"], "train.py"),
        (["sh", "-c", "PYTHONPATH=/app ./prepare; python train.py --set PYTHONPATH=x"], "train.py"),
        (["tini", "--", "python", "train.py"], "train.py"),
        (["python", "train.py"], ""),
        (["sh", "-c", "torchrun train.py"], ""),
        (["sh", "train.sh"], ""),
    ],
)
def test_the_script_that_a_shell_starts_is_named(command: list[str], script: str) -> None:
    container = build_container(*command)
    found = read_command(container)
    assert (found.script, found.refusal) == (script, "")
    named = read_command(container | {"env": [{"name": "PACEKEEPER_LAUNCH_SCRIPT", "value": "other.py"}]})
    assert (named.script, named.refusal) == ("", ""), "the user has named it"


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        (["deepspeed", "--num_gpus=8", "train.py"], "start the script with torchrun"),
        (["bash", "-c", "set -e; mpirun -np 8 python train.py"], "mpirun cannot be converted"),
        (["sh", "-c", "cd /app && NCCL_DEBUG=INFO horovodrun -np 2 python t.py"], "DistributedDataParallel"),
        (["bash", "-lc", "srun python train.py"], "Slurm"),
        (["tune", "run", "lora_finetune_single_device"], "torchrun"),
        (["bash", "-c", "python a.py && python b.py"], "more than once (a.py, b.py)"),
        (["bash", "-c", "python train.py --warm-up; python train.py"], "more than once"),
        (["bash", "-c", "for i in 0 1; do python train.py $i; done"], "in a loop"),
        (["bash", "-c", "until python train.py; do sleep 1; done"], "in a loop"),
        (["bash", "-c", "python train.py & wait"], "in the background"),
        (["bash", "-c", "python train.py --rank ${RANK}"], "have $RANK"),
        (["bash", "-c", "ID=$JOB_COMPLETION_INDEX; python train.py $ID"], "have $JOB_COMPLETION_INDEX"),
        (["bash", "-c", "python $SCRIPT"], "not written in $SCRIPT"),
        (["bash", "-c", 'python "$@"', "--", "train.py"], "not written in $@"),
        (["bash", "-c", "export A=1 PYTHONPATH=/app; python train.py"], "PYTHONPATH=/app:$PYTHONPATH"),
        (["bash", "-c", "PYTHONPATH=$(pwd) torchrun train.py"], "PYTHONPATH=/app:$PYTHONPATH"),
        (["bash", "-c", "torchrun train.py && echo next && torchrun tune.py"], "a TrainingJob of each"),
        (["env", "PYTHONPATH=/app", "python", "train.py"], "PYTHONPATH=/app:$PYTHONPATH"),
        (["bash", "-c", "python -c 'train()'"], "set the variable PACEKEEPER_LAUNCH_SCRIPT"),
        (["python", "-I", "train.py"], "write torchrun --nproc-per-node=1"),
    ],
)
def test_a_launcher_that_cannot_be_converted_has_a_remedy(command: list[str], refused: str) -> None:
    with pytest.raises(ConversionRefused, match=r"spec\.template\.c\.command: ") as raised:
        set_ranks_per_worker(Draft(), build_container(*command), "spec.template.c", RanksField())
    assert refused in str(raised.value)


FIELD = "spec.nprocPerNode"


@pytest.mark.parametrize(
    ("container", "field", "ranks"),
    [
        (build_container("torchrun", "t.py"), "", 1),
        (build_container("torchrun", "t.py", gpus=8), "", 1),
        (build_container("torchrun", "t.py", gpus="8"), "auto", 8),
        (build_container("torchrun", "t.py", gpus=8), "4", 4),
        (build_container("torchrun", "t.py", cpu="3500m"), "auto", 3),
        (build_container("torchrun", "t.py", cpu="500m"), "cpu", 1),
        (build_container("torchrun", "--nproc_per_node", "2", "t.py", gpus=8), "4", 2),
        (build_container("torchrun", "--nproc-per-node=gpu", "t.py", gpus=8), "4", 8),
        (build_container("torchrun", "t.py", PET_NPROC_PER_NODE="6"), "", 6),
        (build_container("torchrun", "--nproc-per-node=$(N)", "t.py", N="3"), "", 3),
        (build_container("bash", "-c", "N=5\ntorchrun --nproc-per-node=$N t.py", N="3"), "", 5),
        (build_container("bash", "-c", "torchrun --nproc-per-node=${N:-7} t.py"), "", 7),
        (build_container("bash", "-c", "torchrun --nproc-per-node=$(nvidia-smi -L | wc -l) t.py", gpus=2), "", 2),
        (build_container("accelerate", "launch", "--num_processes=16", "--num_machines", "4", "t.py"), "", 4),
        (build_container("accelerate", "launch", "--num_processes", "4", "t.py"), "", 2),
        (build_container("accelerate", "launch", "--multi_gpu", "t.py", gpus=4), "8", 4),
        (build_container("accelerate", "launch", "t.py"), "", 1),
        (build_container("python", "t.py", gpus=8), "8", 1),
        (build_container("bash", "train.sh", gpus=4), "", 4),
        (build_container("bash", "train.sh", gpus=4), 2, 2),
        (build_container("bash", "train.sh"), "", 1),
        (build_container("bash", "train.sh", gpus=4, PACEKEEPER_LAUNCH_SCRIPT="train.py"), 2, 1),
        (build_container("bash", "-c", "python t.py", gpus=8), "8", 1),
    ],
)
def test_ranks_per_worker(container: dict[str, Any], field: int | str, ranks: int) -> None:
    draft = Draft(spec={"replicas": 2})
    set_ranks_per_worker(draft, container, "c", RanksField(FIELD, field, auto_counts_processors=True))
    assert draft.spec["nprocPerNode"] == ranks
    assert any(str(ranks) in note.text for note in draft.notes)


@pytest.mark.parametrize(
    ("container", "refused"),
    [
        (build_container("torchrun", "--nproc-per-node=8", "t.py", gpus=4), "exceed its 4 GPUs"),
        (build_container("torchrun", "--nproc-per-node=0", "t.py"), "must be 1 to 128"),
        (build_container("torchrun", "--nproc-per-node=200", "t.py"), "must be 1 to 128"),
        (build_container("torchrun", "t.py", gpus="half"), "must be a whole number of GPUs"),
        (build_container("torchrun", "t.py", cpu="many"), "resources.limits.cpu"),
    ],
)
def test_ranks_that_no_worker_can_have_are_refused(container: dict[str, Any], refused: str) -> None:
    with pytest.raises(ConversionRefused, match=refused):
        set_ranks_per_worker(Draft(), container, "c", RanksField(FIELD, "auto", auto_counts_processors=True))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (["torchrun", "--node-rank=0", "t.py"], ["torchrun", "--node-rank=1", "t.py"], True),
        (["torchrun", "--node_rank", "0", "t.py"], ["torchrun", "--node_rank", "1", "t.py"], True),
        (["sh", "-c", "torchrun --master_addr  a t.py"], ["sh", "-c", "torchrun --master_addr b t.py"], True),
        (["sh", "-c", "torchrun --nnodes 2 t.py --lr 1"], ["sh", "-c", "torchrun --nnodes 2 t.py --lr 2"], False),
        (["torchrun", "t.py"], ["torchrun", "eval.py"], False),
    ],
)
def test_commands_may_differ_in_their_place_in_the_job(one: list[str], other: list[str], same: bool) -> None:
    assert (drop_topology_options(one) == drop_topology_options(other)) is same


def test_variables_are_found_in_all_forms() -> None:
    container = build_container("sh", "-c", "echo $A ${B} $(C) ${D##*-} $1", E="$(F)")
    assert find_variables(container) == {"A", "B", "C", "D", "F", "1"}
