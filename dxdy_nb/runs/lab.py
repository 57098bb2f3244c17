"""JupyterLab on the workbook, and who may come in."""

import ipaddress
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dxdy_nb.errors import DxdyError
from dxdy_nb.runs import lessons

LOOPBACK = "127.0.0.1"
IN_SO_MANY_WORDS = "--open-to-the-network-without-a-password"
# Settings for a person who opens the workbook for the first time: no question before the first lesson.
SETTINGS = Path(__file__).parents[1] / "lesson" / "jupyter"


def command(
    *, port: int = 8888, browser: bool = True, ip: str = LOOPBACK, hosts: Sequence[str] = (), unlocked: bool = False
) -> list[str]:
    """Return the command that opens the first lesson: on this machine only, with a token that Jupyter makes and prints.

    What stands on a command line is stronger than any of the reader's Jupyter settings: a server that these open to
    the network stays on loopback here. Their password counts.

    Parameters
    ----------
    port : the first one to try
    ip : where to listen; anything but loopback needs a password
    hosts : names under which a browser may call it, beside localhost
    unlocked : open to the network without a password: the token alone keeps others out

    Raises
    ------
    DxdyError
        Open to the network without a password, or the reader's settings take the token away.
    """
    locked, tokenless = _keys()
    if not is_loopback(ip) and not locked and not unlocked:
        raise DxdyError(
            f"lab: --ip {ip} opens it to the network: whoever comes in runs programs as you, and no password is set.\n"
            "From another machine of yours an SSH tunnel is safer, and needs no --ip (REMOTE.md). Or set a password:\n"
            f"jupyter server password. Or, where the token alone is to keep others out, add {IN_SO_MANY_WORDS}."
        )
    if tokenless and not locked:
        raise DxdyError(
            'lab: your Jupyter settings say token = "", and no password is set: every user of this machine could run '
            "programs as you. Remove that line (jupyter --paths names the folders), or: jupyter server password."
        )
    return [
        *(sys.executable, "-m", "jupyterlab"),
        f"--ServerApp.ip={ip}",
        f"--ServerApp.port={port}",
        "--ServerApp.allow_remote_access=False",  # answer calls by these names only, against DNS rebinding
        *(f"--ServerApp.local_hostnames={name}" for name in ("localhost", *hosts)),
        "--ServerApp.allow_origin=",
        "--ServerApp.disable_check_xsrf=False",
        f"--ServerApp.root_dir={lessons.NOTEBOOKS.parent}",
        f"--LabApp.default_url=/lab/tree/{lessons.NOTEBOOKS.name}/{lessons.names()[0]}.ipynb",
        "--LabApp.news_url=None",
        "--Application.log_level=WARN",  # the address, and no page of log around it
        "--LanguageServerManager.autodetect=False",
        "-y",  # one Ctrl-C is enough
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        *([] if browser else ["--no-browser"]),
        # Jupyter refuses to run as root unless told: in a container root is the usual user.
        *(["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
    ]


def environment() -> dict[str, str]:
    """Return the environment to start it in."""
    paths = [str(SETTINGS), *filter(None, [os.environ.get("JUPYTER_CONFIG_PATH")])]
    return {**os.environ, "JUPYTER_CONFIG_PATH": os.pathsep.join(paths)}


def is_loopback(ip: str) -> bool:
    """Return whether only this machine reaches an address; a name other than localhost may mean anything.

    Examples
    --------
    >>> [is_loopback(ip) for ip in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "", "*", "example.org")]
    [True, True, True, False, False, False, False]
    """
    try:
        return ipaddress.ip_address(ip).is_loopback
    except ValueError:
        return ip == "localhost"


def _keys() -> tuple[bool, bool]:
    """Return whether the reader's Jupyter settings set a password, and whether they take the token away."""
    settings = _settings("jupyter_server_config", "jupyter_lab_config")
    # The last two are older names; a password under them is not certain to count.
    older = _settings("jupyter_notebook_config")
    sections = ("IdentityProvider", "PasswordIdentityProvider", "ServerApp", "NotebookApp")
    tokens = [read[name].token for read in (settings, older) for name in sections if "token" in read.get(name, {})]
    passwords = [
        settings.get("PasswordIdentityProvider", {}).get("hashed_password"),
        settings.get("ServerApp", {}).get("password"),
    ]
    return any(isinstance(one, str) and one for one in passwords), "" in tokens


def _settings(*names: str) -> Any:
    from jupyter_core.application import JupyterApp

    app = JupyterApp()
    for name in names:
        app.config_file_name = name
        app.load_config_file()
    return app.config
