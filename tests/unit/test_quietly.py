"""What a launcher adds to the messages of its processes, where hftune starts it."""

import logging

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hftune.launchers import quietly


@pytest.fixture
def failing(monkeypatch):
    """Return a function that lets torchrun fail with one process that has left this error file."""
    monkeypatch.setattr("sys.argv", [])  # so that it is put back

    def fail_with(exit_code: int, error_file: str) -> None:
        def main():
            raise ChildFailedError("hftune.run", {0: ProcessFailure(0, 4711, exit_code, error_file)})

        monkeypatch.setattr("torch.distributed.run.main", main)

    yield fail_with
    logging.disable(logging.NOTSET)


def test_torchrun_adds_nothing_to_the_message_of_a_process(failing, tmp_path):
    (tmp_path / "error.json").write_text('{"message": {"message": "no label", "extraInfo": {"timestamp": 1}}}')
    failing(2, str(tmp_path / "error.json"))
    assert quietly.main(["torchrun", "-m", "hftune.run"]) == 2  # which Kubernetes is told not to try again


def test_torchrun_says_how_a_process_died_that_left_no_message(failing, tmp_path):
    failing(-11, str(tmp_path / "error.json"))
    assert "Signal 11 (SIGSEGV) received by PID 4711" in quietly.main(["torchrun", "-m", "hftune.run"])
