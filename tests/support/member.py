"""A process of an elastic job whose agent is a test: tests/support/agents.py. It waits until it is told of its first round."""

import os
import sys
import time
from pathlib import Path

from hftune import run
from hftune.distributed.rounds import FOLDER, ROUND, AgentFolder

folder = Path(os.environ["AGENTS"], os.environ["RANK"])
while not (told := sorted(folder.glob("next_*.json"))):
    time.sleep(0.01)
members = AgentFolder(folder).members(int(told[0].stem.removeprefix("next_")))
os.environ.update(
    {
        **{"RANK": str(members.first_rank), "WORLD_SIZE": str(members.world_size)},
        **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"GROUP_RANK": str(members.machine_rank), "GROUP_WORLD_SIZE": str(members.num_machines)},
        **{"MASTER_ADDR": members.address, "MASTER_PORT": str(members.port)},
        **{ROUND: str(members.round), FOLDER: str(folder)},
    }
)
if "OWN_FOLDERS" in os.environ:  # a relative output_dir is then each machine's own
    os.chdir(folder)
run.leave(run.main(sys.argv[1:]))
