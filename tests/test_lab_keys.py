"""`dxdy lab` listens on this machine only, and opens to the network only where somebody says so in so many words."""

from pathlib import Path

import pytest

from dxdy_nb import cli
from dxdy_nb.errors import DxdyError
from dxdy_nb.runs import lab

PASSWORD = "c.PasswordIdentityProvider.hashed_password = 'argon2:$argon2id$v=19$m=10240,t=10,p=8$abc$def'\n"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's own folder of Jupyter settings, empty."""
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("JUPYTER_CONFIG_PATH", raising=False)
    return tmp_path


def test_by_itself_it_listens_on_loopback_and_knows_one_name(settings: Path) -> None:
    command = lab.command()
    assert [part for part in command if "ServerApp.ip" in part] == ["--ServerApp.ip=127.0.0.1"]
    assert [part for part in command if "local_hostnames" in part] == ["--ServerApp.local_hostnames=localhost"]
    assert "--ServerApp.allow_remote_access=False" in command
    assert not any("token" in part.lower() for part in command)  # other users can read a command line


def test_the_readers_settings_do_not_open_it(settings: Path) -> None:
    (settings / "jupyter_server_config.py").write_text("c.ServerApp.ip = '0.0.0.0'\nc.ServerApp.allow_origin = '*'\n")
    command = lab.command()
    assert "--ServerApp.ip=127.0.0.1" in command
    assert "--ServerApp.allow_origin=" in command


@pytest.mark.parametrize("ip", ["0.0.0.0", "192.0.2.2", "", "*", "::", "some-name"])
def test_the_network_needs_a_password(settings: Path, ip: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", f"--ip={ip}"]) == 2
    told = capsys.readouterr().err
    assert "no password is set" in told
    assert lab.IN_SO_MANY_WORDS in told
    with pytest.raises(SystemExit):
        cli.main(["lab", f"--ip={ip}", "--open-to"])
    (settings / "jupyter_server_config.py").write_text(PASSWORD)
    assert f"--ServerApp.ip={ip}" in lab.command(ip=ip)


def test_an_empty_password_is_none(settings: Path) -> None:
    (settings / "jupyter_server_config.json").write_text('{"PasswordIdentityProvider": {"hashed_password": ""}}')
    with pytest.raises(DxdyError, match="no password"):
        lab.command(ip="0.0.0.0")


def test_told_in_so_many_words_the_token_is_enough(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("os.execve", lambda program, command, environment: started.append(command))
    cli.main(["lab", "--ip=0.0.0.0", lab.IN_SO_MANY_WORDS, "--host=gpu-box", "--no-browser"])
    (command,) = started
    assert {"--ServerApp.ip=0.0.0.0", "--ServerApp.local_hostnames=gpu-box", "--no-browser"} <= set(command)
    assert "--ServerApp.allow_remote_access=False" in command


@pytest.mark.parametrize("file", ["jupyter_server_config", "jupyter_lab_config", "jupyter_config"])
@pytest.mark.parametrize("section", ["IdentityProvider", "ServerApp"])
def test_settings_that_take_the_token_away_are_refused(settings: Path, file: str, section: str) -> None:
    (settings / f"{file}.py").write_text(f"c.{section}.token = ''\n")
    for unlocked in (False, True):
        with pytest.raises(DxdyError, match="every user of this machine"):
            lab.command(unlocked=unlocked)
    (settings / f"{file}.py").write_text(f"c.{section}.token = ''\n{PASSWORD}")
    assert "--ServerApp.ip=127.0.0.1" in lab.command()
