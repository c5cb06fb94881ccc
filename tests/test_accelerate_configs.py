# SPDX-License-Identifier: Apache-2.0
"""The accelerate configurations under examples/: accelerate's own loader and launcher read them."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType


FOLDER = Path(__file__).parents[1] / "examples" / "accelerate"
KINDS = {
    "ddp": (DistributedType.MULTI_GPU, None),
    "fsdp2": (DistributedType.FSDP, None),
    "zero2": (DistributedType.DEEPSPEED, 2),
    "zero3": (DistributedType.DEEPSPEED, 3),
}


def test_every_file_is_known_here():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_accelerate_reads_it_and_the_command_in_its_head_parses(name):
    path = FOLDER / f"{name}.yaml"
    config = load_config_from_file(str(path))
    kind, stage = KINDS[name]
    assert config.distributed_type == kind and config.mixed_precision == "bf16" and config.num_processes == 8
    assert config.deepspeed_config.get("zero_stage") == stage
    # ZeRO-3 must split the target while it is loaded, and save whole drafts.
    assert bool(config.deepspeed_config.get("zero3_init_flag")) == (stage == 3)
    assert bool(config.deepspeed_config.get("zero3_save_16bit_model")) == (stage == 3)
    (command,) = [line for line in path.read_text().splitlines() if line.startswith("# accelerate launch")]
    args = launch_command_parser().parse_args(command.split()[3:])
    assert Path(args.config_file).name == path.name and args.module and args.training_script == "gto_hf"
    assert args.training_script_args[0] == "train"
