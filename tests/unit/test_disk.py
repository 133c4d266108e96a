"""Who may write an output folder, and what is said to the second one."""

import os
import shutil
import socket

import pytest

from hftune import ConfigError
from hftune.checkpoints.atomic_files import only_writer


def test_a_folder_in_use_names_its_user_and_a_way_out_if_that_one_is_lost(tmp_path):
    with only_writer(tmp_path), pytest.raises(ConfigError) as caught, only_writer(tmp_path):
        pass
    assert str(caught.value) == (
        f"output_dir={tmp_path} is in use by process {os.getpid()} on {socket.gethostname()}. Wait for that run to end, or set "
        "output_dir=... to a different folder. If that process no longer exists (its machine was lost, for example), "
        f"remove {tmp_path}/.lock."
    )


def test_a_folder_that_is_removed_meanwhile_does_not_hide_why_the_run_failed(tmp_path):
    folder = tmp_path / "out"
    with pytest.raises(ConfigError, match="the reason"), only_writer(folder):
        shutil.rmtree(folder)
        raise ConfigError("the reason")
