"""The page about running far away, and the text of the image that it names: no image is built here."""

import ast
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from dxdy_nb.runs import doctor, lab

ROOT = Path(__file__).resolve().parents[1]
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
PAGE = (ROOT / "REMOTE.md").read_text()


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the name and the arguments of each instruction of a Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(name.upper(), " ".join(rest.split())) for name, _, rest in (line.partition(" ") for line in lines)]


DOCKERFILE = instructions((ROOT / "Dockerfile").read_text())


def problems(dockerfile: list[tuple[str, str]]) -> list[str]:
    """Return what is wrong with a Dockerfile by the rules of this house."""
    found = []
    for name, rest in dockerfile:
        if name == "FROM" and not re.fullmatch(r"[\w./-]+:(?!latest)[\w.-]*\d[\w.-]*(@sha256:[0-9a-f]{64})?", rest):
            found.append(f"no pinned tag: {rest}")
        if name == "ADD":
            found.append("ADD fetches and unpacks: COPY does neither")
        if name == "EXPOSE":
            found.append("EXPOSE publishes to the network with docker run -P")
        if name == "RUN" and re.search(r"\bsudo\b|curl|wget|--break-system-packages|chmod 777", rest):
            found.append(f"not in an image: {rest}")
        if name == "RUN" and "apt-get install" in rest and "rm -rf /var/lib/apt/lists" not in rest:
            found.append("lists of packages stay in the image")
        if name == "RUN" and "pip install" in rest and "--no-cache-dir" not in rest:
            found.append("pip's cache stays in the image")
        if name in ("ENV", "ARG") and re.search(r"(?i)token|password|secret", rest):
            found.append(f"a secret in an image: {rest}")
    users = [rest for name, rest in dockerfile if name == "USER"]
    if not users or users[-1] in ("root", "0"):
        found.append("it runs as root")
    return found


def test_the_image_is_built_by_the_rules() -> None:
    assert problems(DOCKERFILE) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("FROM a/b\nUSER 1", "no pinned tag"),
        ("FROM a/b:latest\nUSER 1", "no pinned tag"),
        ("FROM a/b:1.0", "runs as root"),
        ("FROM a/b:1.0\nUSER 1\nUSER root", "runs as root"),
        ("FROM a/b:1.0\nUSER 1\nADD https://example.org/a.tar /a", "ADD"),
        ("FROM a/b:1.0\nUSER 1\nEXPOSE 8888", "EXPOSE"),
        ("FROM a/b:1.0\nUSER 1\nRUN apt-get update && \\\n  apt-get install git", "lists of packages"),
        ("FROM a/b:1.0\nUSER 1\nENV JUPYTER_TOKEN=abc", "a secret"),
    ],
)
def test_a_broken_rule_is_told(text: str, problem: str) -> None:
    (found,) = problems(instructions(text))
    assert problem in found


def test_the_image_has_the_torch_that_is_promised() -> None:
    (base,) = [rest for name, rest in DOCKERFILE if name == "FROM"]
    match = re.fullmatch(r"pytorch/pytorch:([\d.]+)-cuda([\d.]+)-cudnn9-runtime", base)
    assert match is not None
    assert match[1] == PINNED["torch"]
    assert match[2] == doctor.NEW_BUILD  # the build that the doctor sends people to, and that pip installs on Linux
    told = (ROOT / "Dockerfile").read_text()
    assert f"driver {doctor.DRIVERS[int(match[2].partition('.')[0])]} or newer" in told
    assert f"{PINNED['torch']}-cuda{doctor.OLD_BUILD}-cudnn9-runtime" in told
    (install,) = [rest for name, rest in DOCKERFILE if name == "RUN" and "pip install" in rest]
    assert "--constraint constraints.txt" in install and "--system-site-packages" in install


def test_the_image_starts_the_lab_with_options_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from dxdy_nb import cli

    (command,) = [ast.literal_eval(rest) for name, rest in DOCKERFILE if name == "CMD"]
    started: list[list[str]] = []
    monkeypatch.setattr("os.execve", lambda program, command, environment: started.append(command))
    assert command[0] == "dxdy"
    cli.main(command[1:])
    assert "--ServerApp.ip=0.0.0.0" in started[0]
    assert lab.IN_SO_MANY_WORDS in command
    assert "--publish 127.0.0.1:8888:8888" in PAGE  # what makes it right to say so


def test_what_a_container_makes_for_itself_is_not_copied_into_it() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv", "runs", "!dxdy_nb/runs"} <= set(ignored)


def test_the_page_says_what_was_not_tried_and_leads_nowhere_that_is_not_there() -> None:
    assert "this image was not built, and no GPU has seen it" in PAGE
    links = [link for link in re.findall(r"\]\(([^)]+)\)", PAGE) if "://" not in link]
    assert links == ["docs/layers.svg"]
    for link in links:
        assert (ROOT / link).is_file()


def test_the_picture_has_words_for_those_who_do_not_see_it_and_asks_for_nothing() -> None:
    picture = ElementTree.parse(ROOT / "docs" / "layers.svg").getroot()
    names = [element.tag.rpartition("}")[2] for element in picture.iter()]
    assert {"title", "desc"} <= set(names)
    assert not {"script", "image", "foreignObject", "use"} & set(names)
    words = " ".join(picture.itertext())
    for layer in ("JupyterLab", "kernel", "PyTorch", "cuDNN", "driver", "GPU", PINNED["torch"], doctor.NEW_BUILD):
        assert layer in words
