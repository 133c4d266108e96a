"""Who may write an output folder, and what is said to the second one."""

import os
import shutil
import socket

import pytest

from hftune import ConfigError
from hftune.checkpoints.lock import only_writer


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


def test_what_a_killed_run_of_another_user_left_is_no_obstacle_in_a_folder_that_both_may_write(tmp_path):
    (tmp_path / ".owner").write_text("process 1 on elsewhere")
    before = (tmp_path / ".owner").stat().st_ino
    with only_writer(tmp_path) as is_ours:
        assert is_ours() and (tmp_path / ".owner").stat().st_ino != before, (
            "another user's file cannot be written, only replaced"
        )
