"""The lowest versions that are said to work are those that are tested."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def versions(name: str) -> dict[str, str]:
    """Package -> version, or lowest version."""
    return dict(re.findall(r"^([\w-]+)(?:==|>=|~=)([\d.]+)", (ROOT / name).read_text(), re.MULTILINE))


def test_the_lowest_versions_are_those_that_the_requirements_allow() -> None:
    lowest = versions("constraints-lowest.txt")
    for package, version in versions("requirements.txt").items():
        assert package == "torch" or lowest[package] == version
